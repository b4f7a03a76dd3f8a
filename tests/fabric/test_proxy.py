"""Learners dial through an HTTP proxy, which sees addresses and ciphertext."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from tests.connect_proxy import FAR as FAR_NAME
from tests.connect_proxy import ConnectProxy
from tests.fabric.conftest import WAIT_S, Learner
from tests.fabric.secured import SECRET, Secured, secured_server

from atoll.digests import compute_digest
from atoll.fabric.address import parse_address
from atoll.fabric.transfer import get_json
from atoll.fabric.wire import FabricLimits
from atoll.protocol.errors import ConfigError, Unreachable
from atoll.protocol.messages import Started

PIN = "ab" * 32
FAR = f"atoll://{SECRET}@far.example:7077/run/{PIN}"
NEAR = f"atoll://{SECRET}@127.0.0.1:7077/run/{PIN}"
HTTPS = {"HTTPS_PROXY": "http://proxy:3128"}


@pytest.fixture(autouse=True)
def no_proxy_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_PROXY", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_server(tmp_path) as place:
        yield place


Join = Callable[[str], Learner]


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    async with AsyncExitStack() as stack:

        def dial(link: str) -> Learner:
            learner = Learner(link, "learner-0", "s0", FabricLimits())
            task = asyncio.create_task(learner.link.run())

            async def end() -> None:
                await learner.link.close()
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAIT_S):
                        await task

            stack.push_async_callback(end)
            return learner

        yield dial


# ---- which proxy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "env", "proxy"),
    [
        (FAR, {}, ""),
        (FAR, HTTPS, "http://proxy:3128"),
        (FAR, {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        (FAR, {**HTTPS, "ATOLL_PROXY": "http://own:1"}, "http://own:1"),
        (FAR, {**HTTPS, "NO_PROXY": "far.example"}, ""),
        (FAR, {**HTTPS, "NO_PROXY": "other, .example"}, ""),
        (FAR, {**HTTPS, "NO_PROXY": "*"}, ""),
        (FAR.replace("far.example", "10.1.2.3"), {**HTTPS, "NO_PROXY": "10.0.0.0/8"}, ""),
        (
            FAR.replace("far.example", "10.1.2.3:7077,far.example"),
            {**HTTPS, "NO_PROXY": "10.0.0.0/8"},
            "http://proxy:3128",
        ),
        (FAR, {**HTTPS, "NO_PROXY": "other.example"}, "http://proxy:3128"),
        (NEAR, HTTPS, ""),
        (NEAR, {"ATOLL_PROXY": "http://own:1"}, "http://own:1"),
        (NEAR.removesuffix(f"/{PIN}"), {"ATOLL_PROXY": "http://own:1"}, ""),
        ("http://127.0.0.1:7077", {"ATOLL_PROXY": "http://own:1"}, ""),
    ],
)
def test_the_environment_names_the_proxy_and_what_is_in_the_clear_goes_to_none(
    link: str, env: dict[str, str], proxy: str
) -> None:
    assert parse_address(link, env).proxy == proxy


@pytest.mark.parametrize("value", ["https://proxy:3128", "socks5://proxy:1080", "http://proxy", "http://proxy:none"])
def test_what_is_no_http_proxy_is_said_without_its_password(value: str) -> None:
    with pytest.raises(ConfigError, match="ATOLL_PROXY is no address of an HTTP proxy: it looks like http://"):
        parse_address(FAR, {"ATOLL_PROXY": value})


# ---- through it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variable", "host"), [("ATOLL_PROXY", "127.0.0.1"), ("HTTPS_PROXY", FAR_NAME)])
async def test_control_and_bodies_go_through_and_the_proxy_reads_none_of_it(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, join: Join, variable: str, host: str
) -> None:
    body = bytes(range(256)) * 8192
    secured.handlers.buffers["learner-0", 1, 0] = bytearray(len(body))
    secured.handlers.fragments[0] = body
    async with ConnectProxy().open() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        learner = join(secured.link(host=host))
        assert isinstance(await learner.heard(), Started)
        await learner.link.put_contribution("learner-0", "s0", 1, 0, memoryview(body), compute_digest(body), 10.0)
        came = bytearray(len(body))
        assert await learner.link.get_fragment(0, memoryview(came), 10.0) == (3, 7, compute_digest(body))
        await learner.link.close()
    assert bytes(came) == body == bytes(secured.handlers.buffers["learner-0", 1, 0])
    assert set(proxy.asked_for) == {f"{host}:{secured.server.port}"} and len(proxy.heads) >= 2
    assert len(proxy.seen) > 2 * len(body), "all of it went this way"
    relayed = bytes(proxy.seen) + "".join(proxy.heads).encode()
    for secret in (SECRET.encode(), b"Bearer", b"Atoll-", b"learner-0", body[:256]):
        assert secret not in relayed


async def test_a_proxy_may_ask_for_a_password(monkeypatch: pytest.MonkeyPatch, secured: Secured, join: Join) -> None:
    async with ConnectProxy("anna:pass-word").open() as proxy:
        monkeypatch.setenv("ATOLL_PROXY", f"http://anna:pass-word@127.0.0.1:{proxy.port}")
        assert await get_json(secured.link(), "/v1/status") == {"round": 7}
        monkeypatch.setenv("ATOLL_PROXY", f"http://anna:wrong-one@127.0.0.1:{proxy.port}")
        said = await join(secured.link()).lost_it()
        with pytest.raises(Unreachable) as caught:
            await get_json(secured.link(), "/v1/status")
    for words in (said, str(caught.value)):
        assert f"the proxy 127.0.0.1:{proxy.port} does not let us through: 407" in words and "wrong-one" not in words


async def test_a_proxy_that_is_down_is_named_and_dialled_again(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, join: Join
) -> None:
    proxy = ConnectProxy()
    reserved = socket.socket()  # bound, not listening: connections are refused, and nobody else gets the port
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    proxy.port = reserved.getsockname()[1]
    monkeypatch.setenv("ATOLL_PROXY", proxy.url)
    learner = join(secured.link())
    said = f"the proxy 127.0.0.1:{proxy.port} cannot be reached: "
    assert said in await learner.lost_it()
    with pytest.raises(Unreachable, match=said):
        await get_json(secured.link(), "/v1/status")
    async with proxy.open():
        assert isinstance(await learner.heard(), Started)
        await learner.link.close()
    reserved.close()


async def test_a_proxy_that_cannot_reach_the_syncer_says_so(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, join: Join
) -> None:
    port = secured.server.port
    await secured.server.stop()
    async with ConnectProxy().open() as proxy:
        monkeypatch.setenv("ATOLL_PROXY", proxy.url)
        said = await join(secured.link()).lost_it()
    assert f"https://127.0.0.1:{port} cannot be reached: the proxy 127.0.0.1:{proxy.port}" in said and "502" in said


async def test_a_proxy_that_says_nothing_is_named_too(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, tmp_path: Path
) -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    monkeypatch.setenv("ATOLL_PROXY", f"http://anna:pass-word@127.0.0.1:{port}")
    learner = Learner(secured.link(), "learner-0", "s0", FabricLimits(dial_s=0.05))
    task = asyncio.create_task(learner.link.run())
    said = await learner.lost_it()
    await learner.link.close()
    await task
    silent.close()
    for writer in held:
        writer.transport.abort()
    await asyncio.sleep(0.01)
    assert said.endswith(f"did not answer within 0.05 s (through the proxy 127.0.0.1:{port})")


async def test_another_certificate_is_noticed_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, join: Join
) -> None:
    async with ConnectProxy().open() as proxy:
        monkeypatch.setenv("ATOLL_PROXY", proxy.url)
        said = await join(secured.link(pin=PIN)).lost_it()
    assert f"the join link names {PIN[:16]}…: somebody else answers there, or the link is old" in said
    assert SECRET.encode() not in bytes(proxy.seen)
