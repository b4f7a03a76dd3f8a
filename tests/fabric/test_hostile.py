"""Whatever a server does to a request, its caller gets PeerError or Unreachable, and nothing else.

The server here speaks bytes. It closes, resets, truncates or stalls at every stage: when the connection is made, in the
middle of the request, in its answer's head, in its body; and it sends answers that are none.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha1

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from atoll.digests import compute_digest
from atoll.fabric import transfer
from atoll.fabric.calls import next_chunk
from atoll.fabric.client import SyncerConnection
from atoll.fabric.transfer import get_fragment_once, get_json, post_score
from atoll.fabric.wire import DIGEST_HEADER, ROUND_HEADER, VERSION_HEADER, FabricLimits, ScoreReport
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.messages import PROTOCOL, Hello

WAIT_S = 60.0
DEADLINE_S = 0.3
BODY = bytes(range(256)) * 16
LARGE = memoryview(bytes(8 << 20))
"""More than the buffers of a connection take: who does not read it holds its sender up."""

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Call = Callable[[str, SyncerConnection], Awaitable[object]]


# ---- the server ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def hostile(script: Script) -> AsyncIterator[str]:
    """Accepts by itself: asyncio's server leaves a connection open that it accepts in the turn it is closed in."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def serve(sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        with suppress(ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.transport.abort()

    def accept() -> None:
        sock, _ = listener.accept()
        tasks.add(task := loop.create_task(serve(sock)))
        task.add_done_callback(lambda _: sock.close())  # also of one that never had its first turn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop.add_reader(listener, accept)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.remove_reader(listener)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def stall(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(WAIT_S)


async def reset_now(writer: asyncio.StreamWriter) -> None:
    reset(writer)


ENDINGS: dict[str, Callable[[asyncio.StreamWriter], Awaitable[None]]] = {
    "close": close,
    "reset": reset_now,
    "stall": stall,
}


def after(answer: bytes, ending: str, *, wanted: bytes = b"\r\n\r\n", more: int = 0) -> Script:
    """Read the request up to `wanted` and so many bytes of its body, say `answer`, end like that."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if wanted:
            await reader.readuntil(wanted)
        if more:
            await reader.readexactly(more)
        writer.write(answer)
        await writer.drain()
        if answer and ending == "reset":
            await asyncio.sleep(0.02)  # a reset takes along what is not read yet
        await ENDINGS[ending](writer)

    return script


HEAD = (
    f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n{VERSION_HEADER}: 3\r\n{ROUND_HEADER}: 7\r\n"
    f"{DIGEST_HEADER}: {compute_digest(BODY)}\r\n\r\n"
).encode()
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

STAGES: dict[str, tuple[bytes, dict[str, object]]] = {
    "before the request": (b"", {"wanted": b""}),
    "in the request's head": (b"", {"wanted": b"\r\n"}),
    "after the request's head": (b"", {}),
    "in the status line": (b"HTTP/1.1 2", {}),
    "after the status line": (b"HTTP/1.1 200 OK\r\n", {}),
    "in the head": (HEAD[: len(HEAD) // 2], {}),
    "after the head": (HEAD, {}),
    "in the body": (HEAD + BODY[:1000], {}),
    "one byte before its end": (HEAD + BODY[:-1], {}),
    "in a chunk": (CHUNKED + b"100\r\nabc", {}),
    "between two chunks": (CHUNKED + b"3\r\nabc\r\n", {}),
    "in a complaint": (b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n{", {}),
    "in an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n", {}),
}


def at_every_stage(ending: str) -> dict[object, Script]:
    return {stage: after(answer, ending, **how) for stage, (answer, how) in STAGES.items()}  # type: ignore[arg-type]


NONSENSE: dict[str, bytes] = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(4096),
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a chunk's size that is none": CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    "a long line": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x00\x00",
    "nothing but its end": HEAD.replace(str(len(BODY)).encode(), b"0"),
    "more than it says": HEAD + BODY + BODY,
    "squeezed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xfe{}",
    "JSON of another kind": b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n[1,2, 3]",
}


# ---- the callers -----------------------------------------------------------------------------------------------------


def into() -> memoryview:
    return memoryview(bytearray(len(BODY)))


async def state(url: str, link: SyncerConnection) -> object:
    return await link.get_state(
        "ticket", lambda size: memoryview(bytearray(size)), learner="a", session="s", most_bytes=1 << 20, deadline_s=2.0
    )


def relay(url: str, link: SyncerConnection) -> Awaitable[object]:
    return link.put_relay("ticket", [LARGE], offset=0, digest="0" * 32, learner="a", session="s", deadline_s=DEADLINE_S)


GETS: dict[str, Call] = {
    "get_json": lambda url, link: get_json(url, "/v1/status", DEADLINE_S),
    "get_fragment_once": lambda url, link: get_fragment_once(url, 0, into(), DEADLINE_S),
    "get_fragment": lambda url, link: link.get_fragment(0, into(), DEADLINE_S),
    "get_state": state,
}
PUTS: dict[str, Call] = {
    "put_contribution": lambda url, link: link.put_contribution("a", "s", 1, 1, LARGE, "0" * 32, DEADLINE_S),
    "put_initial": lambda url, link: link.put_initial("a", "s", 1, LARGE, "0" * 32, DEADLINE_S),
    "put_relay": relay,
    "post_score": lambda url, link: post_score(url, ScoreReport(round=1, loss=1.0, cpu_s=1.0), DEADLINE_S),
    "post_settings": lambda url, link: transfer.post_settings(url, ["quorum=1"], DEADLINE_S),
    "post_drain": lambda url, link: transfer.post_drain(url, "a", DEADLINE_S),
}


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """Nothing is left for the loop to complain of."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    yield
    await asyncio.sleep(0)
    assert complaints == []


def a_link(url: str, lost: asyncio.Queue[str] | None = None) -> SyncerConnection:
    return SyncerConnection(
        url,
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=lambda message: None,
        on_lost=lost.put_nowait if lost is not None else lambda reason: None,
        limits=FabricLimits(dial_s=DEADLINE_S, body_idle_s=DEADLINE_S, flush_s=DEADLINE_S, backoff_s=0.001),
        jitter=lambda: 0.0,
    )


async def end_well(call: Call, scripts: Mapping[object, Script]) -> None:
    """All at once; who does not is named by what was done to it."""
    found = await asyncio.gather(*(ends_well(call, script) for script in scripts.values()), return_exceptions=True)
    assert {what: error for what, error in zip(scripts, found, strict=True) if error is not None} == {}


async def ends_well(call: Call, script: Script) -> None:
    """With an answer where that is what came, with an error of ours otherwise."""
    async with hostile(script) as url:
        link = a_link(url)
        try:
            async with asyncio.timeout(WAIT_S):
                with suppress(PeerError, Unreachable):
                    await call(url, link)
        finally:
            await link.close()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", [*GETS, *PUTS])
async def test_a_connection_may_end_at_every_stage(name: str, ending: str) -> None:
    await end_well({**GETS, **PUTS}[name], at_every_stage(ending))


@pytest.mark.parametrize("name", [*GETS, *PUTS])
async def test_an_answer_may_be_none(name: str) -> None:
    await end_well({**GETS, **PUTS}[name], {what: after(answer, "close") for what, answer in NONSENSE.items()})


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n", HEAD])
@pytest.mark.parametrize("name", ["put_contribution", "put_initial", "put_relay"])
async def test_a_body_may_be_cut_off_on_its_way_out(name: str, answer: bytes, ending: str) -> None:
    await ends_well(PUTS[name], after(answer, ending, more=100_000))


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_an_answer_may_end_after_any_byte(ending: str) -> None:
    whole = HEAD + BODY
    cuts = [*range(len(HEAD) + 8), *range(len(HEAD) + 8, len(whole), 997)]
    for first in range(0, len(cuts), 32):
        scripts = {cut: after(whole[:cut], ending) for cut in cuts[first : first + 32]}
        await end_well(GETS["get_fragment"], scripts)


async def test_what_is_whole_is_taken() -> None:
    """The same server with a good answer: it is not the test that fails every call."""
    async with hostile(after(HEAD + BODY, "close")) as url:
        link, came = a_link(url), into()
        assert await link.get_fragment(0, came, DEADLINE_S) == (3, 7, compute_digest(BODY))
        assert bytes(came) == BODY
        await link.close()


@pytest.mark.parametrize("name", ["get_fragment", "get_state", "put_contribution", "put_relay"])
async def test_a_link_that_closes_in_the_middle_ends_its_bodies_with_an_error_of_ours(name: str) -> None:
    answer = HEAD + BODY[:1000] if name in GETS else b""
    async with hostile(after(answer, "stall")) as url:
        link = a_link(url)
        going = asyncio.ensure_future({**GETS, **PUTS}[name](url, link))
        await asyncio.sleep(0.05)
        await link.close()
        with pytest.raises((PeerError, Unreachable)):
            await going
        with pytest.raises((PeerError, Unreachable)):
            await {**GETS, **PUTS}[name](url, link)


@pytest.mark.parametrize("turns", range(8))
async def test_the_server_here_leaves_nothing_open_whenever_it_is_closed(turns: int) -> None:
    """Somebody dials, and so many turns of the event loop later it is closed. (A warning tells of a socket that is.)"""
    async with hostile(after(b"", "stall")) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
            for _ in range(turns):
                await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)  # a closed transport lets go of its socket in a later turn of the loop
    gc.collect()


# ---- the control channel ---------------------------------------------------------------------------------------------


def upgraded(frames: bytes, ending: str) -> Script:
    """A WebSocket that is opened as it should be; then these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        key = next(line.split(": ", 1)[1] for line in head if line.lower().startswith("sec-websocket-key"))
        accept = b64encode(sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{answer}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode() + frames)
        await writer.drain()
        await asyncio.sleep(0.02)
        await ENDINGS[ending](writer)

    return script


FRAMES = {
    "nothing": b"",
    "a ping": b"\x89\x00",
    "many pings": b"\x89\x00" * 5000,
    "half a frame": b"\x82\x7e\x10",
    "a frame that is none": b"\xff\xff\xff\xff\xff",
    "a message that is none": b"\x82\x03abc",
    "text": b"\x81\x03abc",
    "a close": b"\x88\x02\x03\xe8",
}


async def is_lost(script: Script) -> str:
    """The link tells that it is lost, and lives on to dial again."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with hostile(script) as url:
        link = a_link(url, lost)
        running = asyncio.ensure_future(link.run())
        try:
            async with asyncio.timeout(WAIT_S):
                await lost.get()
                reason = await lost.get()
            assert not running.done()
        finally:
            await link.close()
            await asyncio.wait([running])
        await running
        return reason


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_channel_is_lost_and_dialled_again_whatever_answers(ending: str) -> None:
    assert all(await asyncio.gather(*(is_lost(script) for script in at_every_stage(ending).values())))


async def test_a_channel_that_is_none_is_dialled_again() -> None:
    assert all(await asyncio.gather(*(is_lost(after(answer, "close")) for answer in NONSENSE.values())))


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("what", FRAMES)
async def test_an_open_channel_may_end_after_anything(what: str, ending: str) -> None:
    assert await is_lost(upgraded(FRAMES[what], ending))


async def test_a_body_whose_connection_is_gone_already_is_unreachable() -> None:
    """aiohttp says RuntimeError: Connection closed."""
    gone = BaseProtocol(asyncio.get_running_loop())
    with pytest.raises(Unreachable, match=r"Connection closed\."):
        await next_chunk(aiohttp.StreamReader(gone, 1024))
