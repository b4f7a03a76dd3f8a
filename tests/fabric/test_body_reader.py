"""Bodies that are read straight into their buffers: however their bytes come, the body and the answers are the same,
and what comes behind a body is no part of it."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiohttp import web_protocol
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric.conftest import WAIT_S, Learner
from tests.fabric.secured import SECRET, Secured, secured_server

from atoll.digests import compute_digest
from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.body_reader import READ_BYTES, BodyReader, extend
from atoll.fabric.calls import receive_body
from atoll.fabric.certificates import fingerprint, make_server
from atoll.fabric.requests import HEAD_BYTES
from atoll.fabric.tls import client_context, server_context
from atoll.fabric.transfer import FragmentArrival, asked, body_session, get_body
from atoll.fabric.wire import FabricLimits
from atoll.protocol.errors import Unreachable

if TYPE_CHECKING:
    from .conftest import ServedFabric

LARGE = bytes(range(256)) * 4 * 700
"""More than aiohttp reads ahead."""
SMALL = bytes(reversed(range(256))) * 8
STATUS = b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n"
GUARD = 64
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def contribution(number: int, body: bytes, more: str = "") -> bytes:
    head = f"PUT /v1/contributions/learner-0/{number}/0 HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Atoll-Session: s0\r\nAtoll-Digest: {compute_digest(body)}\r\n{more}\r\n".encode() + body


def guarded(handlers: object, number: int, size: int) -> bytearray:
    """The buffer of a contribution, with bytes on both sides that nobody may touch."""
    buffer = bytearray(b"\xaa" * (size + 2 * GUARD))
    handlers.buffers["learner-0", number, 0] = memoryview(buffer)[GUARD : GUARD + size]  # type: ignore[attr-defined]
    return buffer


def is_intact(buffer: bytearray) -> bool:
    return bytes(buffer[:GUARD] + buffer[-GUARD:]) == b"\xaa" * 2 * GUARD


async def let_go() -> None:
    """Whatever does not hold a buffer for good lets go of it; a thread does so a moment after it has told a digest."""
    await asyncio.get_running_loop().shutdown_default_executor()
    gc.collect()


async def read_answers(reader: asyncio.StreamReader, count: int) -> list[int]:
    found = []
    async with asyncio.timeout(WAIT_S):
        for _ in range(count):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if "content-length: " in head:
                await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
            found.append(int(head.split()[1]))
    return found


async def write_split(writer: asyncio.StreamWriter, stream: bytes, cuts: Sequence[int], turns: Sequence[int]) -> None:
    """In pieces that end at the cuts, with some turns of the event loop between two."""
    ends = [*sorted(set(cuts)), len(stream)]
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        writer.write(stream[start:end])
        await writer.drain()
        for _ in range(turns[number % len(turns)]):
            await asyncio.sleep(0)


@asynccontextmanager
async def secured_with_learner(folder: Path) -> AsyncIterator[tuple[Secured, Callable[[], asyncio.Future[Connection]]]]:
    """A port with TLS, a learner with an open channel, and how to make a bare connection."""
    async with secured_server(folder) as there:
        learner = Learner(there.link(), "learner-0", "s0", FabricLimits())
        running = asyncio.create_task(learner.link.run())
        await learner.heard()
        made: list[asyncio.StreamWriter] = []

        async def connect() -> Connection:
            context = client_context(there.pin)
            reader, writer = await asyncio.open_connection("127.0.0.1", there.server.port, ssl=context)
            made.append(writer)
            return reader, writer

        try:
            yield there, lambda: asyncio.ensure_future(connect())
        finally:
            for writer in made:
                writer.transport.abort()
            await learner.link.close()
            await running


# ---- a syncer reads -------------------------------------------------------------------------------------------------

STREAM = [contribution(0, LARGE), STATUS + b"\r\n", contribution(1, SMALL), contribution(2, SMALL), STATUS + b"\r\n"]
WHOLE = b"".join(STREAM)
HEADS = [WHOLE.index(piece) for piece in STREAM] + [len(STREAM[0]) - len(LARGE), len(STREAM[0])]
near_heads = st.sampled_from(HEADS).flatmap(lambda at: st.integers(at - 3, at + 200))
cuts = st.lists(
    (st.integers(1, len(WHOLE) - 1) | near_heads).map(lambda at: min(max(at, 1), len(WHOLE) - 1)), max_size=12
)
turns = st.lists(st.integers(0, 4), min_size=1, max_size=4)


async def send_whole(handlers: object, connection: Connection, cuts: Sequence[int], turns: Sequence[int]) -> None:
    buffers = [guarded(handlers, number, len(body)) for number, body in enumerate((LARGE, SMALL, SMALL))]
    reader, writer = connection
    await write_split(writer, WHOLE, cuts, turns)
    assert await read_answers(reader, 5) == [204, 200, 204, 204, 200]
    for buffer, body in zip(buffers, (LARGE, SMALL, SMALL), strict=True):
        assert buffer[GUARD:-GUARD] == body and is_intact(buffer)


async def test_any_split_of_requests_gives_the_same_bodies_and_answers(place: ServedFabric) -> None:
    """Bodies, and requests behind them, on one connection."""
    await place.open()
    await place.joined()
    loop = asyncio.get_running_loop()

    async def check(cuts: Sequence[int], turns: Sequence[int]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.server.port)
        try:
            await send_whole(place.handlers, (reader, writer), cuts, turns)
        finally:
            writer.transport.abort()

    @settings(max_examples=60)
    @given(cuts, turns)
    def every(cuts: list[int], turns: list[int]) -> None:
        asyncio.run_coroutine_threadsafe(check(cuts, turns), loop).result(WAIT_S)

    await asyncio.to_thread(every)
    assert place.server.mistakes.count == 0


async def test_any_split_of_requests_over_tls_gives_the_same_bodies_and_answers(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with secured_with_learner(tmp_path) as (there, connect):
        shown = f"Authorization: Bearer {SECRET}\r\nAtoll-Run: run\r\n"

        async def check(cuts: Sequence[int], turns: Sequence[int]) -> None:
            buffers = [guarded(there.handlers, number, len(body)) for number, body in enumerate((LARGE, SMALL))]
            stream = contribution(0, LARGE, shown) + contribution(1, SMALL, shown)
            reader, writer = await connect()
            await write_split(writer, stream, [at for at in cuts if at < len(stream)], turns)
            assert await read_answers(reader, 2) == [204, 204]
            for buffer, body in zip(buffers, (LARGE, SMALL), strict=True):
                assert buffer[GUARD:-GUARD] == body and is_intact(buffer)

        @settings(max_examples=20)
        @given(cuts, turns)
        def every(cuts: list[int], turns: list[int]) -> None:
            asyncio.run_coroutine_threadsafe(check(cuts, turns), loop).result(WAIT_S)

        await asyncio.to_thread(every)
        assert there.server.mistakes.count == 0
        buffer = bytearray(len(LARGE))
        there.handlers.buffers["learner-0", 0, 0] = buffer
        reader, writer = await connect()
        writer.write(contribution(0, LARGE, shown))
        assert await read_answers(reader, 1) == [204]
        await let_go()
        buffer.append(0)  # BufferError: the connection, which stays open, still holds it


@pytest.mark.parametrize("size", [0, 1, 1000, len(LARGE) - 1])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_body_that_breaks_off_is_given_up_and_may_come_again(
    place: ServedFabric, size: int, reset: bool
) -> None:
    await place.open()
    await place.joined()
    buffer = guarded(place.handlers, 0, len(LARGE))
    head = contribution(0, LARGE)[: -len(LARGE)]
    reader, writer = await place.raw()
    writer.write(head + LARGE[:size])
    await writer.drain()
    await place.until(lambda: place.server.bytes_in >= size and bool(place.server._intake._taken))
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()
    aborted = await place.handlers.until("aborted")
    assert f"the connection broke after {size} of {len(LARGE)} bytes" in str(aborted[-1])
    assert is_intact(buffer)
    reader, writer = await place.raw()
    writer.write(head + LARGE)
    assert await read_answers(reader, 1) == [204]
    assert buffer[GUARD:-GUARD] == LARGE
    assert place.server.mistakes.count == 0


async def test_a_body_over_tls_that_breaks_off_is_given_up(tmp_path: Path) -> None:
    async with secured_with_learner(tmp_path) as (there, connect):
        buffer = guarded(there.handlers, 0, len(LARGE))
        _, writer = await connect()
        stream = contribution(0, LARGE, f"Authorization: Bearer {SECRET}\r\nAtoll-Run: run\r\n")
        writer.write(stream[:-1000])
        await writer.drain()
        writer.transport.abort()
        aborted = await there.handlers.until("aborted")
        assert "the connection broke after" in str(aborted[-1]) and is_intact(buffer)


async def test_more_bytes_than_the_body_has_are_no_part_of_it(place: ServedFabric) -> None:
    """They are the next request: here one that nobody can read."""
    await place.open()
    await place.joined()
    buffer = guarded(place.handlers, 0, len(LARGE))
    reader, writer = await place.raw()
    writer.write(contribution(0, LARGE) + b"\x00" * 100)
    assert await read_answers(reader, 1) == [204]
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    assert buffer[GUARD:-GUARD] == LARGE and is_intact(buffer)


async def test_far_more_bytes_than_the_body_has_cost_the_connection(place: ServedFabric) -> None:
    await place.open()
    await place.joined()
    buffer = guarded(place.handlers, 0, len(LARGE))
    reader, writer = await place.raw()
    writer.write(contribution(0, LARGE) + b"\x00" * 4 * HEAD_BYTES)
    async with asyncio.timeout(WAIT_S):
        with suppress(ConnectionError):
            await reader.read()
    assert is_intact(buffer)
    assert (await place.request("GET", "/v1/status"))[0] == 200


async def test_behind_a_body_that_was_too_slow_requests_are_read_again_where_it_ended(place: ServedFabric) -> None:
    """What is left of it is dropped as it comes, and never taken for a request."""
    await place.open(FabricLimits(body_idle_s=0.05, flush_s=WAIT_S))
    await place.joined()
    buffer = guarded(place.handlers, 0, len(LARGE))
    hidden = STATUS + b"\r\n"
    body = LARGE[: -len(hidden)] + hidden
    request = contribution(0, body)
    reader, writer = await place.raw()
    writer.write(request[: len(request) - len(hidden) - 100])
    assert await read_answers(reader, 1) == [408]
    writer.write(request[len(request) - len(hidden) - 100 :] + STATUS + b"\r\n")
    assert await read_answers(reader, 1) == [200]
    writer.write(request)
    assert await read_answers(reader, 1) == [204]
    assert buffer[GUARD:-GUARD] == body and is_intact(buffer)


async def test_a_stop_waits_once_for_a_body_that_stands_still(
    place: ServedFabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp waits for a request, ends it, and waits for that: the second wait is over at once."""
    await place.open(FabricLimits(flush_s=1.0))
    await place.joined()
    guarded(place.handlers, 0, len(LARGE))
    _, writer = await place.raw()
    writer.write(contribution(0, LARGE)[:-1000])
    await place.until(lambda: place.server.bytes_in >= len(LARGE) - 1000)
    waits: list[asyncio.Timeout] = []

    def note(seconds: float) -> asyncio.Timeout:
        waits.append(asyncio.timeout(seconds))
        return waits[-1]

    monkeypatch.setattr(web_protocol, "ceil_timeout", note)
    await place.server.stop()
    assert place.handlers.told("aborted")[-1][-1] == "the syncer is stopping"
    assert sum(wait.expired() for wait in waits) == 1 and not caplog.records


@pytest.mark.parametrize("turns", range(12))
async def test_a_port_may_be_closed_in_any_turn_of_the_loop_while_a_body_comes(place: ServedFabric, turns: int) -> None:
    """aiohttp drops what comes from then on, also before anybody reads the body."""
    await place.open(FabricLimits(flush_s=0.1))
    await place.joined()
    guarded(place.handlers, 0, len(LARGE))
    runner = place.server._runner
    assert runner is not None and runner.server is not None
    with socket.create_connection(("127.0.0.1", place.server.port)) as sock:
        sock.setblocking(False)
        sock.send(contribution(0, LARGE))  # more than one turn reads
        for _ in range(turns):
            await asyncio.sleep(0)
        runner.server.pre_shutdown()
        for _ in range(10):
            await asyncio.sleep(0)
    await place.server.stop()
    assert place.server.mistakes.count == 0


# ---- a courier reads ------------------------------------------------------------------------------------------------

FETCHED = 3, 7, compute_digest(LARGE)
ANSWER = (
    f"HTTP/1.1 200 OK\r\nContent-Length: {len(LARGE)}\r\nAtoll-Version: 3\r\nAtoll-Round: 7\r\n"
    f"Atoll-Digest: {compute_digest(LARGE)}\r\n"
)


@asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamWriter], asyncio.Future[None]], context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[int]]]:
    """A server that answers every request as it is told to: its port, and the requests of each connection."""
    requests: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(0)
        mine = len(requests) - 1
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                requests[mine] += 1
                await answer(writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


@pytest.mark.parametrize("tls", [False, True], ids=["in the clear", "TLS"])
async def test_any_split_of_answers_gives_the_same_version_on_one_connection(tmp_path: Path, tls: bool) -> None:
    loop = asyncio.get_running_loop()
    split: list[Sequence[int]] = [(), (1,)]
    pair, context, url = make_server(["127.0.0.1"], 1.0), None, "http://127.0.0.1:{}"
    if tls:
        (tmp_path / "cert.pem").write_bytes(pair.certificate)
        (tmp_path / "key.pem").write_bytes(pair.key)
        context, url = server_context(tmp_path / "cert.pem", tmp_path / "key.pem"), "https://127.0.0.1:{}"

    def answer(writer: asyncio.StreamWriter) -> asyncio.Future[None]:
        stream = f"{ANSWER}\r\n".encode() + LARGE
        return asyncio.ensure_future(write_split(writer, stream, [at for at in split[0] if at < len(stream)], split[1]))

    async with answering(answer, context) as (port, requests):
        where = parse_address(url.format(port)) if not tls else pinned(port, pair.certificate)
        async with body_session(where, FabricLimits()) as session:

            async def check(cuts: Sequence[int], turns: Sequence[int]) -> None:
                split[:] = [cuts, turns]
                into = bytearray(b"\xaa" * (len(LARGE) + 2 * GUARD))
                arrival = FragmentArrival(memoryview(into)[GUARD:-GUARD])
                fragment = f"{where.urls[0]}/v1/fragments/0"
                assert await get_body(session, lambda: fragment, arrival, WAIT_S, FabricLimits()) == FETCHED
                assert into[GUARD:-GUARD] == LARGE and is_intact(into) and arrival.received == len(LARGE)

            @settings(max_examples=20 if tls else 60)
            @given(cuts, turns)
            def every(cuts: list[int], turns: list[int]) -> None:
                asyncio.run_coroutine_threadsafe(check(cuts, turns), loop).result(WAIT_S)

            await asyncio.to_thread(every)
            assert len(requests) == 1 and requests[0] >= 20
            into = bytearray(len(LARGE))
            arrival, fragment = FragmentArrival(memoryview(into)), f"{where.urls[0]}/v1/fragments/0"
            await get_body(session, lambda: fragment, arrival, WAIT_S, FabricLimits())
            del arrival
            await let_go()
            into.append(0)  # BufferError: the connection, which stays open, still holds it


def pinned(port: int, certificate: bytes) -> SyncerAddress:
    return SyncerAddress(urls=(f"https://127.0.0.1:{port}",), run="run", token=SECRET, pin=fingerprint(certificate))


async def test_a_version_that_breaks_off_leaves_its_connection_and_what_came() -> None:
    """Of a syncer that closes in the middle: what has come is counted, and nothing else is asked on that connection."""

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(f"{ANSWER}\r\n".encode() + LARGE[:-1000])
        await writer.drain()
        writer.close()

    came: list[int] = []
    async with (
        answering(lambda writer: asyncio.ensure_future(half(writer))) as (port, requests),
        body_session(parse_address(f"http://127.0.0.1:{port}"), FabricLimits()) as session,
    ):
        for _ in range(2):
            with pytest.raises(Unreachable, match="the connection is lost"):
                async with asked(session, "GET", f"http://127.0.0.1:{port}/v1/fragments/0", WAIT_S) as response:
                    await receive_body(response, memoryview(bytearray(len(LARGE))), came.append)
    assert sum(came) == 2 * (len(LARGE) - 1000) and requests == [1, 1]


async def test_a_body_that_is_not_waited_for_any_longer_ends_its_connection() -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(f"{ANSWER}\r\n".encode() + LARGE[:-1000])
        await writer.drain()

    came: list[int] = []
    async with (
        answering(lambda writer: asyncio.ensure_future(half(writer))) as (port, requests),
        body_session(parse_address(f"http://127.0.0.1:{port}"), FabricLimits()) as session,
    ):
        for _ in range(2):
            with pytest.raises(Unreachable, match="was not done within"):
                async with asked(session, "GET", f"http://127.0.0.1:{port}/v1/fragments/0", 0.2) as response:
                    await receive_body(response, memoryview(bytearray(len(LARGE))), came.append)
    assert requests == [1, 1]


@pytest.mark.parametrize("more", [b"garbage", ANSWER.encode() + b"\r\n" + LARGE], ids=["garbage", "another answer"])
async def test_bytes_behind_an_answer_end_its_connection_and_are_no_answer_to_what_is_asked_next(more: bytes) -> None:
    hung_up: asyncio.Queue[int] = asyncio.Queue()
    behind = [more, b""]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{ANSWER}\r\n".encode() + LARGE)
        await writer.drain()
        writer.write(behind.pop(0))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.transport.abort()
        hung_up.put_nowait(len(behind))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    where = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(WAIT_S):
        async with body_session(parse_address(where), FabricLimits()) as session:
            arrival = FragmentArrival(memoryview(bytearray(len(LARGE))))
            assert await get_body(session, lambda: where, arrival, WAIT_S, FabricLimits()) == FETCHED
            assert await hung_up.get() == 1
            arrival = FragmentArrival(memoryview(bytearray(len(LARGE))))
            assert await get_body(session, lambda: where, arrival, WAIT_S, FabricLimits()) == FETCHED
        assert await hung_up.get() == 0


async def test_a_version_in_chunks_is_no_syncers_whatever_length_it_names() -> None:
    async def chunks(writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"{ANSWER}Transfer-Encoding: chunked\r\n\r\n{len(LARGE):x}\r\n".encode() + LARGE + b"\r\n0\r\n\r\n"
        )
        await writer.drain()

    async with (
        answering(lambda writer: asyncio.ensure_future(chunks(writer))) as (port, _),
        body_session(parse_address(f"http://127.0.0.1:{port}"), FabricLimits()) as session,
    ):
        fragment, arrival = (
            f"http://127.0.0.1:{port}/v1/fragments/0",
            FragmentArrival(memoryview(bytearray(len(LARGE)))),
        )
        with pytest.raises(Unreachable, match="Transfer-Encoding can't be present"):
            await get_body(session, lambda: fragment, arrival, WAIT_S, FabricLimits())


async def test_bytes_that_come_with_the_end_of_a_deadline_do_not_move_it() -> None:
    """The timer has fired, and the task that it ends has not had its turn."""
    loop, found = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda loop, context: found.append(context))

    async def wait() -> None:
        async with asyncio.timeout(-1) as deadline:
            loop.call_soon(extend, deadline, loop.time() + WAIT_S)
            await asyncio.sleep(WAIT_S)

    with pytest.raises(TimeoutError):
        await wait()
    assert not found


class OpenTransport:
    """As much of a transport as a reader asks for."""

    def __init__(self) -> None:
        self.protocol: asyncio.BaseProtocol = asyncio.Protocol()
        self.closing = False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.closing


async def test_no_turn_of_the_event_loop_reads_more_than_its_share() -> None:
    """Heartbeats have their turn in the middle of the largest body."""
    transport = OpenTransport()
    body, came = memoryview(bytearray(2 * READ_BYTES + 1)), []
    reader = BodyReader(transport, body, came.append)  # type: ignore[arg-type]
    while transport.protocol is reader:
        reader.buffer_updated(len(reader.get_buffer(-1)))
    await reader.wait()
    assert came == [READ_BYTES, READ_BYTES, 1]


async def test_a_connection_that_is_being_closed_stays_taken_and_its_end_is_passed_on() -> None:
    class Before(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            heard.append(error)

    transport, heard = OpenTransport(), []
    transport.protocol = Before()
    reader = BodyReader(transport, memoryview(bytearray(10)), lambda size: None)  # type: ignore[arg-type]
    transport.closing = True
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert transport.protocol is reader
    reader.buffer_updated(len(reader.get_buffer(-1)))  # TLS reads on for a while
    gone = ConnectionResetError("gone")
    reader.connection_lost(gone)
    assert heard == [gone]
    with pytest.raises(Unreachable, match="the connection is lost"):
        BodyReader(transport, memoryview(bytearray(10)), lambda size: None)  # type: ignore[arg-type]
