"""A browser's way in: a code that counts once, a cookie that counts as long as its token, and what neither opens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.fabric.conftest import MemoryDesk
from tests.fabric.test_authorizer import LEARNER, REVOKED, VIEWER, asks, bearer, refusal

from atoll.fabric.authorizer import (
    CODE_S,
    CODES,
    COOKIE_S,
    OneTimeCodes,
    TokenAuthorizer,
    Visitor,
    cookie_for,
    token_of_cookie,
)
from atoll.fabric.join_tokens import JoinTokens, new_secret
from atoll.fabric.server import Server
from atoll.observe.dashboard.site import Dashboard

ALL = JoinTokens([LEARNER, VIEWER, REVOKED])
HOST = "127.0.0.1:7077"


def cookies(value: str) -> dict[str, str]:
    return {"atoll-7077": value}


def test_a_code_counts_once_and_for_a_day() -> None:
    codes = OneTimeCodes()
    first, second = codes.make(VIEWER, 0.0), codes.make(VIEWER, 0.0)
    assert first != second and codes.token_of(first, CODE_S - 1) is VIEWER
    codes.use(first)
    assert codes.token_of(first, 1.0) is None and codes.token_of(second, CODE_S) is None
    assert codes.token_of("", 1.0) is codes.token_of("nothing", 1.0) is None


def test_codes_that_nobody_uses_take_no_memory() -> None:
    codes = OneTimeCodes()
    made = [codes.make(VIEWER, 0.0) for _ in range(CODES + 1)]
    assert [codes.token_of(code, 1.0) for code in (made[0], made[1])] == [None, VIEWER]


def test_a_cookie_counts_for_its_token_and_its_time() -> None:
    value = cookie_for(VIEWER, 1000.0)
    assert token_of_cookie(ALL, cookies(value), HOST, 1001.0) is VIEWER
    assert token_of_cookie(ALL, cookies(value), HOST, 1000.0 + COOKIE_S) is None
    assert token_of_cookie(ALL, cookies(value), "127.0.0.1:7078", 1001.0) is None, "another run's"
    other = JoinTokens([type(VIEWER)(id=VIEWER.id, secret=new_secret(), role="viewer")])
    assert token_of_cookie(other, cookies(value), HOST, 1001.0) is None, "the token was made anew"


def test_no_other_cookie_counts() -> None:
    name, ends, seal = cookie_for(VIEWER, 1000.0).split(".")
    later = str(int(ends) + 1)
    for value in ("", ".", "..", f"{name}.{later}.{seal}", f"{name}.{ends}.", f"{name}.{ends}.ü", f"{name}.-1.{seal}"):
        assert token_of_cookie(ALL, cookies(value), HOST, 1001.0) is None
    for value in (
        f"a.{ends}.{seal}",
        f"____.{ends}.{seal}",
        f"{name}.{'9' * 400}.{seal}",
        f"{name}.²²²²²²²²²²².{seal}",
    ):
        assert token_of_cookie(ALL, cookies(value), HOST, 1001.0) is None
    for host in ("", "a:b:c", "[::1", "127.0.0.1:99999"):
        assert token_of_cookie(ALL, cookies(cookie_for(VIEWER, 1000.0)), host, 1001.0) is None


def test_a_code_of_a_token_that_was_replaced_opens_nothing() -> None:
    tokens = [ALL]
    door = TokenAuthorizer(lambda: tokens[0], lambda: "r1")
    path = door.make_code(VIEWER.id)
    assert door.admit(asks(path)).token == VIEWER.id
    anew = msgspec.structs.replace(VIEWER, secret="a-secret-that-came-later")
    tokens[0] = JoinTokens([anew if token is VIEWER else token for token in ALL.all])
    assert refusal(asks(path), door)[0] == 401


def test_a_cookie_opens_the_pages_and_nothing_else() -> None:
    door = TokenAuthorizer(lambda: ALL, lambda: "r1")
    code = door.make_code("join").rpartition("/")[2]
    value = door.take_code(code, Visitor("join"))
    assert value and door.take_code(code, Visitor("join")) == "", "a used link makes no cookie last longer"
    for path in ("/", "/metrics", "/assets/app.js", "/v1/live"):
        assert door.admit(asks(path, Cookie=f"atoll-7077={value}", Host=HOST)).token == "join"
    for path in ("/v1/status", "/v1/control", "/v1/fragments/0", "/v1/settings", "/v1/codes", "/v1/probe/8"):
        assert refusal(asks(path, Cookie=f"atoll-7077={value}", Host=HOST), door)[0] == 401
    gone = cookie_for(REVOKED, 1e9)
    assert refusal(asks("/", Cookie=f"atoll-7077={gone}", Host=HOST), door)[0] == 401


@asynccontextmanager
async def shown(folder: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    door = TokenAuthorizer(lambda: ALL, lambda: "r1", password=False)
    pages = Dashboard(folder / "events.jsonl")
    server = Server(MemoryDesk(), host="127.0.0.1", port=0, authorizer=door, pages=pages)
    await server.start()
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address, as browsers keep them
    async with aiohttp.ClientSession(cookie_jar=jar) as http:
        yield http, f"http://127.0.0.1:{server.port}"
    await server.stop()


async def test_a_link_opens_the_dashboard_once(tmp_path: Path) -> None:
    async with shown(tmp_path) as (http, url):
        async with http.get(f"{url}/") as answer:
            assert answer.status == 401 and "WWW-Authenticate" not in answer.headers
        async with http.post(f"{url}/v1/codes", headers={"Authorization": bearer(VIEWER)}) as answer:
            path = (await answer.json())["path"]
        async with http.get(f"{url}{path}") as answer:
            said = answer.headers["Set-Cookie"]
            assert answer.status == 200 and "HttpOnly" in said and "SameSite=Strict" in said and "Domain" not in said
            assert answer.headers["Cache-Control"] == "no-store" and 'url=../"' in await answer.text()
        async with http.get(f"{url}/") as answer:
            assert answer.status == 200 and "<html" in await answer.text()
        async with http.get(f"{url}{path}") as answer:
            assert answer.status == 200, "whoever has the cookie may click again"
        http.cookie_jar.clear()
        async with http.get(f"{url}{path}") as answer:
            assert answer.status == 401 and "atoll dashboard RUN prints" in await answer.text()


@pytest.mark.parametrize("path", ["/enter/", "/enter/x", "/enter/../", "/enter/%00", "/enter/" + "x" * 4000])
async def test_a_code_that_was_never_made_opens_nothing(tmp_path: Path, path: str) -> None:
    async with shown(tmp_path) as (http, url), http.get(f"{url}{path}") as answer:
        assert answer.status == 401 and "Set-Cookie" not in answer.headers


async def test_a_page_may_not_ask_for_a_code(tmp_path: Path) -> None:
    headers = {"Authorization": bearer(VIEWER), "Origin": "http://evil.example"}
    async with shown(tmp_path) as (http, url), http.post(f"{url}/v1/codes", headers=headers) as answer:
        assert answer.status == 403
