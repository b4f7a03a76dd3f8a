"""Connections that send requests without reading, or headers without an end: what they cost is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from atoll.fabric.requests import HEAD_BYTES, RequestReader
from atoll.fabric.wire import KIB, MIB, FabricLimits

if TYPE_CHECKING:
    from .conftest import ServedFabric

STATUS = b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n"
LARGE = b"GET /v1/fragments/0 HTTP/1.1\r\nHost: [::1]\r\n\r\n"
TUNNEL = b"CONNECT [::1]:80 HTTP/1.1\r\nHost: [::1]\r\n"
WAIT_S = 30.0


def padding(size: int) -> bytes:
    """Headers of so many bytes in all, none of which is too long."""
    return b"".join(b"X-%04d: %s\r\n" % (number, b"a" * (1024 - 10)) for number in range(size // 1024))


def readers(place: ServedFabric) -> list[RequestReader]:
    listener = place.server._listener
    assert listener is not None
    return [one for one in listener._by_connection if isinstance(one, RequestReader)]


async def everything(reader: asyncio.StreamReader) -> bytes:
    said = b""
    async with asyncio.timeout(WAIT_S):
        try:
            while more := await reader.read(1 << 16):
                said += more
        except ConnectionResetError:
            pass
    return said


async def one_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), await reader.readexactly(length)


async def test_headers_that_are_too_long_in_all_are_refused(place: ServedFabric) -> None:
    await place.open()
    reader, writer = await place.raw()
    writer.write(STATUS + padding(HEAD_BYTES))
    assert (await everything(reader)).startswith(b"HTTP/1.1 431 ")


async def test_headers_that_are_long_are_read_in_whatever_pieces_they_come(place: ServedFabric) -> None:
    await place.open()
    reader, writer = await place.raw()
    request = STATUS + padding(HEAD_BYTES - 1024) + b"\r\n"
    for size in (1, 3, 100, len(request)):
        for at in range(0, len(request), size):
            writer.write(request[at : at + size])
            if size > 1:
                await asyncio.sleep(0)
        assert (await one_answer(reader))[0] == 200


async def test_headers_of_a_later_request_that_never_end_are_cut_off(place: ServedFabric) -> None:
    await place.open(FabricLimits(header_s=0.2))
    reader, writer = await place.raw()
    writer.write(STATUS + b"\r\n")
    assert (await one_answer(reader))[0] == 200
    writer.write(STATUS)
    assert await everything(reader) == b""
    await place.until(lambda: not readers(place))


async def test_an_answer_that_is_not_read_holds_no_more_than_one_request_behind_it(place: ServedFabric) -> None:
    """It asks for a large body, reads nothing, and sends requests behind it: those wait unread, and then it is cut
    off."""
    place.handlers.fragments[0] = bytes(64 * MIB)
    await place.open()
    reader, writer = await place.raw()
    writer.write(LARGE)
    await place.until(lambda: place.handlers.held == 1)
    writer.write((STATUS + b"\r\n") * 20)
    await place.until(lambda: any(one._ahead for one in readers(place)))
    [one] = readers(place)
    assert not one._messages and len(one._ahead) <= HEAD_BYTES
    writer.write((STATUS + padding(4 * KIB) + b"\r\n") * 20)
    await place.until(lambda: not readers(place))
    await place.handlers.until("released")
    await everything(reader)


async def test_requests_in_one_piece_with_another_are_read_when_that_one_is_answered(place: ServedFabric) -> None:
    """Also behind a body, and behind one that asks for a WebSocket and gets none."""
    await place.open()
    reader, writer = await place.raw()
    score = b'{"round": 1, "loss": 1.0, "cpu_s": 1.0}'
    body = b"POST /v1/scores HTTP/1.1\r\nHost: [::1]\r\nContent-Length: %d\r\n\r\n" % len(score) + score
    upgrade = b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    writer.write(STATUS + b"\r\n\r\n\r\n" + body + upgrade + STATUS + b"\r\n")
    assert (await one_answer(reader))[0] == 200
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
    assert [(await one_answer(reader))[0] for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (STATUS + b"Content-Length: 1000000\r\n\r\n" + bytes(100_000), "a GET has no body"),
        (
            b'POST /v1/settings HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n["a"]\r\n0\r\n\r\n'
            + (STATUS + b"\r\n") * 100,
            "the body has no length",
        ),
        (STATUS.replace(b"GET", b"HEAD") + b"Content-Length: 1000000\r\n\r\n" + bytes(100_000), ""),
        (STATUS + b"Content-Length: 4\r\n\r\nbody" + (STATUS + b"\r\n") * 100, "a GET has no body"),
        (TUNNEL + b"Content-Length: 1000000\r\n\r\n" + (STATUS + b"\r\n") * 100, "no tunnels are made here"),
        (STATUS + b"Content-Length: %d\r\n\r\n" % (2**64 - 1) + (STATUS + b"\r\n") * 100, "a GET has no body"),
        (TUNNEL + b"\r\n" + (STATUS + b"\r\n") * 100, "no tunnels are made here"),
    ],
    ids=[
        "a body that nobody reads",
        "chunks, and requests behind them",
        "a body of a HEAD",
        "a body of a GET that comes whole, and requests behind it",
        "a tunnel with a body, which is requests",
        "a length that aiohttp takes for none",
        "a tunnel, and requests behind it",
    ],
)
async def test_what_could_hide_requests_is_refused(place: ServedFabric, request_: bytes, says: str) -> None:
    await place.open(FabricLimits(flush_s=0.1))
    reader, writer = await place.raw()
    writer.write(request_)
    answer = await everything(reader)
    assert answer.count(b"HTTP/1.1") == 1 and answer.startswith(b"HTTP/1.1 400") and says.encode() in answer


# ---- answers ------------------------------------------------------------------------------------------------------


async def test_an_answer_that_is_not_taken_costs_its_reader_the_connection(place: ServedFabric) -> None:
    await place.open(FabricLimits(send_s=0.1, body_rate=1024 * MIB))
    place.handlers.status = lambda: b'"' + b"a" * (32 * MIB) + b'"'  # type: ignore[method-assign]
    _, writer = await place.raw()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(STATUS + b"\r\n")
    await place.until(lambda: bool(readers(place)))
    await place.until(lambda: not readers(place))
    assert place.server.mistakes.count == 0


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_a_head_is_answered_without_the_body(place: ServedFabric, size: int) -> None:
    """Otherwise its reader takes the body for the answer to its next request."""
    await place.open()
    place.handlers.status = lambda: b'"' + b"a" * size + b'"'  # type: ignore[method-assign]
    reader, writer = await place.raw()
    writer.write(STATUS.replace(b"GET", b"HEAD") + b"\r\n" + STATUS + b"\r\n")
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"Content-Length: %d\r\n" % (size + 2) in head
    assert await one_answer(reader) == (200, place.handlers.status())


async def test_large_answers_that_are_not_taken_share_their_memory(place: ServedFabric) -> None:
    """More are refused while they wait; and small ones never."""
    await place.open(FabricLimits(answer_bytes=80 * MIB))
    small = place.handlers.status
    place.handlers.status = lambda: b'"' + b"a" * (32 * MIB) + b'"'  # type: ignore[method-assign]
    _, writer = await place.raw()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(STATUS + b"\r\n")
    await place.until(lambda: place.server._answers._by_token.total() > 0)
    status, text = await place.request("GET", "/v1/status")
    assert status == 429 and "too many answers" in json.loads(text)["error"]
    place.handlers.status = small  # type: ignore[method-assign]
    assert (await place.request("GET", "/v1/status"))[0] == 200
    writer.transport.abort()
    await place.until(lambda: place.server._answers._by_token.total() == 0)


async def test_a_probe_that_is_not_read_is_no_mistake_of_ours(place: ServedFabric) -> None:
    await place.open(FabricLimits(send_s=0.1))
    _, writer = await place.raw()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /v1/probe/67108864 HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    await place.until(lambda: bool(place.server._probe._busy))
    await place.until(lambda: not readers(place) and not place.server._probe._busy)
    assert place.server.mistakes.count == 0
