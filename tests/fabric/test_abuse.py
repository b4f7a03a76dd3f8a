"""What strangers, and people with the wrong token, try at a syncer that stands in the open. docs/security.md lists it.

Each case is refused with its reason; the digest of the syncer's state is the same before and after; and an honest
learner's channel is open and answered all the while (see `fort`). What learners try is in test_abuse_learners.py.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import cache

import aiohttp
import msgspec
import pytest
from tests.syncer.conftest import WAIT_S

from atoll.fabric import certificates
from atoll.fabric.certificates import fingerprint, make_authority, make_server
from atoll.fabric.join_tokens import JoinTokens
from atoll.fabric.tls import client_context
from atoll.observe.dashboard.site import MOST_VIEWERS
from atoll.protocol.messages import Refused
from atoll.syncer.credentials import write_tokens

from .fort import STRANGE, TOKENS, Fort

Case = Callable[[Fort], Awaitable[str]]
STATUS = "GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n"


@cache
def make_bomb() -> bytes:
    return gzip.compress(bytes(64 << 20))


def asks(method: str, path: str, who: str | None = None, data: object = None, **headers: str) -> Case:
    async def case(fort: Fort) -> str:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        status, reason = await fort.request(method, path, who, named, data)
        return f"{status} {reason}"

    return case


def says(text: str, who: str | None = None, *, tls: bool = True) -> Case:
    """These very bytes; `AUTH` stands for the header with a token."""

    async def case(fort: Fort) -> str:
        auth = f"Authorization: Bearer {TOKENS[who].secret}" if who else "X: y"
        return await fort.says(text.replace("AUTH", auth).encode("latin-1"), tls=tls)

    return case


async def never_ending_header(fort: Fort) -> str:
    reader, writer = await fort.raw()
    writer.write(b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n")

    async def drip() -> None:
        while True:
            writer.write(b"X-A: b\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(5):
            rest = await reader.read()
    except (ConnectionError, ssl.SSLError):
        rest = b""
    finally:
        dripping.cancel()
    return f"cut off after {rest!r}"


async def handshake_and_silence(fort: Fort) -> str:
    reader, _ = await fort.raw()
    try:
        async with asyncio.timeout(5):
            return f"cut off after {await reader.read()!r}"
    except (ConnectionError, ssl.SSLError):
        return "cut off after b''"


async def downgrade(fort: Fort) -> str:
    old = client_context(fort.pin)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        return str(await fort.request("GET", "/v1/status", "join", ssl=old))
    except aiohttp.ClientError as error:
        return f"no handshake: {type(error).__name__}"


async def another_runs_link(fort: Fort) -> str:
    return await fort.refusal_of(fort.join("eu-1", where=fort.link("eu", run="r2")))


async def another_runs_token(fort: Fort) -> str:
    return await fort.refusal_of(fort.join("eu-1", where=fort.link("strange")))


async def basic_in_no_alphabet(fort: Fort) -> str:
    return await fort.says(
        "GET /v1/status HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Basic ünïcödé\r\n\r\n".encode("latin-1")
    )


async def viewers_channel(fort: Fort) -> str:
    return await fort.refusal_of(fort.join("eu-1", "look"))


async def page_elsewhere(fort: Fort, path: str, who: str) -> str:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await fort.socket(who, path, headers={"Origin": "https://evil.example.org"})
    return str(caught.value.status)


async def stranger_with_a_long_body(fort: Fort) -> str:
    """Chunks without an end: it hears that it is nobody, and not more of it is read than comes in a moment."""
    reader, writer = await fort.raw()
    writer.write(b"PUT /v1/initial/a/0 HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def pour() -> None:
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await asyncio.sleep(0.001)

    pouring = asyncio.create_task(pour())
    try:
        async with asyncio.timeout(5):
            return (await reader.read(4096)).decode()
    finally:
        pouring.cancel()


CASES: dict[str, tuple[Case, str]] = {
    # who are you
    "no credentials": (asks("GET", "/v1/status"), "^401 this syncer asks for a token"),
    "no credentials, a path that is not there": (asks("GET", "/v1/nothing"), "^401 this syncer asks for a token"),
    "no credentials, a body": (asks("PUT", "/v1/initial/a/0", data=b"x" * 100), "^401 this syncer asks"),
    "wrong token": (asks("GET", "/v1/status", Authorization=f"Bearer {'x' * 64}"), "^401 this token is not known"),
    "revoked token": (asks("GET", "/v1/status", "gone"), "^401 the token 'gone' was revoked"),
    "expired token": (asks("GET", "/v1/status", "over"), "^401 the token 'over' expired on 1970"),
    "another run's token": (another_runs_token, "this token is not known here"),
    "another run's link": (another_runs_link, "the join link is for another run, and this is run r1"),
    "token in the query": (asks("GET", f"/v1/status?token={TOKENS['boss'].secret}"), "^401 this syncer asks"),
    "token in a cookie": (asks("GET", "/v1/status", Cookie=f"token={TOKENS['boss'].secret}"), "^401 this syncer asks"),
    "two tokens": (
        says(f"{STATUS}AUTH\r\nAuthorization: Bearer x\r\n\r\n", "join"),
        "401 Unauthorized|400 Bad Request",
    ),
    "basic in no alphabet": (basic_in_no_alphabet, "401 Unauthorized"),
    "very long authorization": (says(f"{STATUS}Authorization: Bearer {'x' * 9000}\r\n\r\n"), "400 Bad Request"),
    # how do you speak
    "plain HTTP to the TLS port": (says(f"{STATUS}AUTH\r\n\r\n", "join", tls=False), "400 .*this port speaks TLS"),
    "no HTTP at all": (says("\x00\x01\x02 hello?\r\n\r\n"), "400 Bad Request|^$"),
    "downgrade to TLS 1.2": (downgrade, "no handshake"),
    "never ending header": (never_ending_header, "cut off after b''"),
    "handshake, then silence": (handshake_and_silence, "cut off after b''"),
    "thousand headers": (says(STATUS + "X-A: b\r\n" * 1000 + "AUTH\r\n\r\n", "join"), "400 Bad Request"),
    "very long address": (
        says(f"GET /{'a' * 9000} HTTP/1.1\r\nHost: [::1]\r\nAUTH\r\n\r\n", "join"),
        "400 Bad Request",
    ),
    "folded header": (says(f"{STATUS}X-A: b\r\n c\r\nAUTH\r\n\r\n", "join"), "400 Bad Request"),
    "two lengths": (
        says(
            "POST /v1/scores HTTP/1.1\r\nHost: [::1]\r\nAUTH\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            "join",
        ),
        "400 Bad Request",
    ),
    "length and chunks": (
        says(
            "POST /v1/settings HTTP/1.1\r\nHost: x\r\nAUTH\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
            "0\r\n\r\n",
            "boss",
        ),
        "400 Bad Request",
    ),
    "a second request behind a refused one": (
        says(f"{STATUS}\r\n{STATUS}AUTH\r\n\r\n", "join"),
        r"^HTTP/1.1 401(?!.*HTTP/1.1).*$",
    ),
    "expects to be asked for its body": (
        says("PUT /v1/initial/a/0 HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"),
        r"^HTTP/1.1 401(?!.*100 Continue)",
    ),
    "chunks without an end": (stranger_with_a_long_body, "^HTTP/1.1 401"),
    "upgrade to HTTP/2": (
        says(f"{STATUS}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"),
        "^HTTP/1.1 401",
    ),
    "HTTP/1.0": (says("GET /v1/status HTTP/1.0\r\n\r\n"), "^HTTP/1.[01] 401"),
    "TRACE": (says("TRACE /v1/status HTTP/1.1\r\nHost: [::1]\r\nAUTH\r\nConnection: close\r\n\r\n", "boss"), " 405 "),
    "OPTIONS": (asks("OPTIONS", "/v1/settings", "boss"), "^405 "),
    "CONNECT": (
        says("CONNECT x:22 HTTP/1.1\r\nHost: [::1]:22\r\nAUTH\r\nConnection: close\r\n\r\n", "boss"),
        " 40[0-9] ",
    ),
    "a verb of its own": (
        says("OVERTHROW / HTTP/1.1\r\nHost: [::1]\r\nAUTH\r\nConnection: close\r\n\r\n", "boss"),
        " 40[05] ",
    ),
    # what is yours to do
    "a viewer joins": (viewers_channel, "the token 'look' is for a viewer, and this takes a learner"),
    "a viewer takes the weights": (asks("GET", "/v1/fragments/0", "look"), "^403 the token 'look' is for a viewer"),
    "a viewer scores": (asks("POST", "/v1/scores", "look", b"{}"), "^403 the token 'look' is for a viewer"),
    "a name made to lead here": (
        asks("GET", "/v1/fragments/0", "join", Host="evil.example"),
        "^403 this syncer is not known as 'evil.example'",
    ),
    "a learner scores": (asks("POST", "/v1/scores", "join", b"{}"), "^403 .*learner, and this takes an evaluator"),
    "an operator scores": (asks("POST", "/v1/scores", "boss", b"{}"), "^403 .*operator, and this takes an evaluator"),
    "a learner is a relay": (asks("GET", "/v1/relays", "join"), "^403 .*learner, and this takes a relay"),
    "an evaluator joins": (asks("GET", "/v1/control", "score"), "^403 .*evaluator, and this takes a learner"),
    "an evaluator sends a body": (asks("PUT", "/v1/initial/x/0", "score"), "^403 .*and this takes a learner"),
    "an evaluator changes settings": (asks("POST", "/v1/settings", "score", b"[]"), "^403 .*takes an operator"),
    "a learner changes settings": (asks("POST", "/v1/settings", "join", b'["quorum=1"]'), "403 .* takes an operator"),
    "a learner drains another": (asks("POST", "/v1/drain", "eu", b'["honest"]'), "403 .* takes an operator"),
    "a body without a hello": (
        asks("PUT", "/v1/contributions/eu-1/0/0", "eu", b"x" * 16, Atoll_Session="s"),
        "^403 eu-1 has no open control channel",
    ),
    "a path for a name": (
        asks("PUT", "/v1/contributions/..%2F..%2Fjournal/0/0", "eu", b"x" * 16),
        "^403 ../../journal has no open control channel|^40[04] ",
    ),
    "a path for an asset": (asks("GET", "/assets/..%2F..%2F..%2Frun.toml", "look"), "^404 "),
    "a file of the run": (asks("GET", "/run.toml", "look"), "^404 "),
    "an unknown fragment": (asks("GET", "/v1/fragments/99", "join"), "^404 "),
    "a guessed ticket": (
        asks("GET", "/v1/relay/0000-0000", "join", Atoll_Learner="honest", Atoll_Session="guessed"),
        "^403 honest has no open control channel under this session",
    ),
    # people and their browsers
    "dashboard, POST": (asks("POST", "/", "boss", b"x"), "^405 "),
    "dashboard, PUT": (asks("PUT", "/metrics", "boss", b"x"), "^405 "),
    "dashboard, DELETE": (asks("DELETE", "/", "boss"), "^405 "),
    "dashboard, PATCH": (asks("PATCH", "/assets/app.js", "boss", b"x"), "^405 "),
    "status, POST": (asks("POST", "/v1/status", "boss", b"x"), "^405 "),
    "cross-site WebSocket to the dashboard": (lambda fort: page_elsewhere(fort, "/v1/live", "look"), "^403$"),
    "cross-site WebSocket to the control": (lambda fort: page_elsewhere(fort, "/v1/control", "join"), "^403$"),
    "cross-site settings": (
        asks("POST", "/v1/settings", "boss", b'["quorum=1"]', Origin="https://evil.example.org"),
        "^403 web pages may only read",
    ),
    "a page of no origin": (asks("POST", "/v1/settings", "boss", b'["quorum=1"]', Origin="null"), "^403 web pages"),
    # bodies that are larger than they look
    "compressed settings": (
        lambda fort: asks("POST", "/v1/settings", "boss", make_bomb(), Content_Encoding="gzip")(fort),
        "^400 settings could not be read",
    ),
    "compressed score": (
        lambda fort: asks("POST", "/v1/scores", "score", make_bomb(), Content_Encoding="gzip")(fort),
        "^400 a score could not be read",
    ),
    "long score": (asks("POST", "/v1/scores", "score", b'"' + b"x" * (2 << 20) + b'"'), "^413 "),
    "settings that are none": (
        asks("POST", "/v1/settings", "boss", b'{"quorum": 1}'),
        "^400 settings could not be read",
    ),
    "settings nobody knows": (asks("POST", "/v1/settings", "boss", b'["sudo=1"]'), "^409 .*sudo"),
    "a measurement without end": (asks("GET", "/v1/probe/999999999", "join"), "^400 .* too many to measure with"),
}


@pytest.mark.parametrize("name", CASES)
async def test_abuse_is_refused_and_changes_nothing(fort: Fort, name: str) -> None:
    case, expected = CASES[name]
    await fort.open()
    before = await fort.digest()
    reason = await case(fort)
    assert re.search(expected, reason, re.DOTALL), reason
    assert STRANGE.secret not in reason and not any(one.secret in reason for one in TOKENS.values())
    await fort.unharmed(before)


async def test_wrong_host(fort: Fort) -> None:
    """By an authority, a certificate is for a name: one who answers under another is not spoken to."""
    await fort.open()
    before, context = await fort.digest(), client_context("", fort.keys.authority)
    _, writer = await asyncio.open_connection("127.0.0.1", fort.port, ssl=context, server_hostname="localhost")
    writer.close()
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        await asyncio.open_connection("127.0.0.1", fort.port, ssl=context, server_hostname="syncer.example.org")
    await fort.unharmed(before)


async def test_another_authoritys_syncer(fort: Fort) -> None:
    await fort.open()
    before, other = await fort.digest(), fort.write("other", make_authority(1.0))
    with pytest.raises(aiohttp.ClientConnectorCertificateError, match="CERTIFICATE_VERIFY_FAILED"):
        await fort.request("GET", "/v1/status", "join", ssl=client_context("", other[0]))
    await fort.unharmed(before)


async def test_another_fingerprint(fort: Fort) -> None:
    await fort.open()
    before = await fort.digest()
    with pytest.raises(aiohttp.ClientConnectorCertificateError, match="somebody else answers there"):
        await fort.request("GET", "/v1/status", "join", ssl=client_context("0" * 64))
    await fort.unharmed(before)


@pytest.mark.parametrize("which", ["none", "another authority's", "expired", "a syncer's"])
async def test_mutual_tls_without_a_certificate_that_counts(
    fort: Fort, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fort.open(mutual=True)
    before = await fort.digest()
    match which:
        case "none":
            shown: tuple[object, ...] = ()
        case "another authority's":
            shown = fort.of_learner("eve", make_authority(1.0))
        case "expired":
            with monkeypatch.context() as patched:
                patched.setattr(certificates, "datetime", _Past)
                shown = fort.of_learner("eve")
        case _:
            shown = (fort.keys.certificate, fort.keys.key)
    context = client_context(fort.pin, None, *shown)  # type: ignore[arg-type]
    with pytest.raises((aiohttp.ClientError, OSError)):
        await fort.request("GET", "/v1/status", "join", ssl=context)
    await fort.unharmed(before)


class _Past(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime.now(UTC) - timedelta(days=2)


async def test_a_renewed_certificate_is_shown_to_newcomers_and_costs_nobody_a_connection(fort: Fort) -> None:
    await fort.open()
    before, old = await fort.digest(), fort.pin
    fort.keys.write(fort.keys.key, make_server(["localhost"], 1.0).key)  # half of another pair
    await fort.until(lambda: any("is not taken" in event["text"] for event in fort.stage.events("warning")))
    assert (await fort.request("GET", "/v1/status", "join"))[0] == 200
    pair = make_server(["localhost", "127.0.0.1"], 30.0, fort.authority)
    fort.write("syncer", pair)
    await fort.until(lambda: fort.stage.events("renewed"))
    fort.pin = fingerprint(pair.certificate)
    with pytest.raises((aiohttp.ClientError, ssl.SSLError), match="or the link is old"):
        await fort.request("GET", "/v1/status", "join", ssl=client_context(old))
    both = client_context(f"{old},{fort.pin}")
    assert (await fort.request("GET", "/v1/status", "join", ssl=both))[0] == 200
    await fort.unharmed(before)


async def test_that_a_certificate_ends_soon_is_in_the_status(fort: Fort) -> None:
    await fort.open()
    await fort.until(lambda: any("certificate ends in" in event["text"] for event in fort.stage.events("warning")))
    assert fort.stage.service.figures().notice.startswith("the syncer's certificate ends in 24 hours")


def without(id: str) -> JoinTokens:
    return JoinTokens(TOKENS.values()).without(id)


def anew(id: str) -> JoinTokens:
    """As `atoll cert --force` makes them: all the names are there, none of the secrets."""
    replaced = {name: msgspec.structs.replace(token, secret=secrets.token_hex(16)) for name, token in TOKENS.items()}
    return JoinTokens({**TOKENS, id: replaced[id]}.values())


ENDS = [(without, "was revoked"), (anew, "was replaced by another of its name")]


@pytest.mark.parametrize(("change", "why"), ENDS)
async def test_a_token_that_counts_no_more_ends_its_channels(
    fort: Fort, change: Callable[[str], JoinTokens], why: str
) -> None:
    await fort.open()
    rogue = fort.join("eu-1", "eu")
    await rogue.begin()
    await fort.until(lambda: fort.machine.members.learners["eu-1"].recovered)
    before = await fort.digest()
    write_tokens(fort.keys, change("eu"))
    refused = await rogue.until(Refused)
    assert refused.final and f"the token 'eu' {why}" in refused.reason
    status, reason = await fort.request("GET", "/v1/status", "eu")
    assert status == 401 and reason
    await fort.unharmed(before)


def looks_on(fort: Fort, who: str) -> Awaitable[aiohttp.ClientWebSocketResponse]:
    return fort.socket(who, "/v1/live", headers={"Origin": f"https://127.0.0.1:{fort.port}"})


async def end_of(socket: aiohttp.ClientWebSocketResponse) -> tuple[int | None, str]:
    """The code and the reason that a viewer is sent away with."""
    async with asyncio.timeout(WAIT_S):
        while (frame := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
    return socket.close_code, str(frame.extra)


@pytest.mark.parametrize(("change", "reason"), ENDS)
async def test_a_viewers_token_that_counts_no_more_ends_what_it_looks_at(
    fort: Fort, change: Callable[[str], JoinTokens], reason: str
) -> None:
    await fort.open()
    before, wall, boss = await fort.digest(), await looks_on(fort, "look"), await looks_on(fort, "boss")
    await wall.receive_str()
    began = asyncio.get_running_loop().time()
    write_tokens(fort.keys, change("look"))
    code, why = await end_of(wall)
    assert code == aiohttp.WSCloseCode.POLICY_VIOLATION and why.startswith(f"the token 'look' {reason}")
    assert asyncio.get_running_loop().time() - began < 2 + 1, "two seconds, and a slow machine's one"
    assert (await boss.receive_str()).startswith("{"), "who else looks on does not notice"
    await fort.unharmed(before)


async def test_one_viewers_token_keeps_nobody_else_from_looking(fort: Fort) -> None:
    await fort.open()
    before = await fort.digest()
    greedy = [await looks_on(fort, "look") for _ in range(MOST_VIEWERS)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await looks_on(fort, "look")
    assert refused.value.status == 503
    newest = asyncio.create_task(end_of(greedy[-1]))
    boss = await looks_on(fort, "boss")
    assert (await boss.receive_str()).startswith("{")
    code, why = await newest
    assert code == aiohttp.WSCloseCode.TRY_AGAIN_LATER and why.startswith("others look on too")
    await fort.unharmed(before)


async def test_a_browser_with_a_viewers_token_sees_the_dashboard_from_elsewhere(fort: Fort) -> None:
    """What is not abuse must work: under a name that is advertised, with the password typed in."""
    await fort.open()
    shown = "Basic " + base64.b64encode(f"anna:{TOKENS['look'].secret}".encode()).decode()
    status, page = await fort.request("GET", "/", None, {"Authorization": shown, "Host": "syncer.example.org:7077"})
    assert status == 200 and "<html" in page
    await fort.socket("look", "/v1/live", headers={"Origin": f"https://127.0.0.1:{fort.port}"})
