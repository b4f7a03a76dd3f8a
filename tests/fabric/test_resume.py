"""A version that breaks off on its way goes on at the byte it had come to; whatever else is answered is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from atoll.digests import compute_digest
from atoll.fabric.address import parse_address
from atoll.fabric.transfer import FragmentArrival, body_session, get_body
from atoll.fabric.wire import FabricLimits
from atoll.protocol.errors import PeerError, Unreachable

if TYPE_CHECKING:
    from .conftest import ServedFabric

BODY = bytes(range(256)) * 800
OTHER = bytes(reversed(BODY))
QUICK = FabricLimits(backoff_s=0.001, backoff_cap_s=0.001)
Cut = Callable[[], int]
"""How many bytes the next connection brings before it breaks."""


@asynccontextmanager
async def breaking(port: int, cut: Cut) -> AsyncIterator[str]:
    """A way to the server that breaks every connection after some bytes."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = cut()
        back, far = await asyncio.open_connection("127.0.0.1", port)
        far.write(await reader.readuntil(b"\r\n\r\n"))
        while left > 0 and (data := await back.read(min(left, 4096))):
            writer.write(data)
            await writer.drain()
            left -= len(data)
        for one in (writer, far):
            one.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def fetch(url: str, arrival: FragmentArrival) -> tuple[int, int, str]:
    async with body_session(parse_address(url), QUICK) as session:
        return await get_body(session, lambda: f"{url}/v1/fragments/0", arrival, 60.0, QUICK)


def empty() -> FragmentArrival:
    return FragmentArrival(memoryview(bytearray(len(BODY))))


@pytest.mark.parametrize("every", [1000, 1460, 4096, 10_000, 65_537, 200_000])
async def test_a_body_that_is_cut_after_every_few_bytes_comes_whole_and_no_byte_twice(
    place: ServedFabric, every: int
) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    cuts: list[int] = []

    def cut() -> int:
        cuts.append(every)
        return every

    arrival = empty()
    async with breaking(place.server.port, cut) as url:
        assert await fetch(url, arrival) == (3, 7, compute_digest(BODY))
    assert bytes(arrival.into) == BODY
    assert arrival.received == len(BODY)
    assert len(cuts) > len(BODY) // every
    assert place.handlers.held == 0


async def test_where_the_version_has_changed_meanwhile_the_newer_one_comes_whole(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    tries: list[int] = []

    def cut() -> int:
        if tries:
            place.handlers.fragments[0] = OTHER
        tries.append(0)
        return 50_000 if len(tries) == 1 else 1_000_000

    arrival = empty()
    async with breaking(place.server.port, cut) as url:
        assert await fetch(url, arrival) == (3, 7, compute_digest(OTHER))
    assert bytes(arrival.into) == OTHER
    assert len(BODY) < arrival.received < len(BODY) + 50_000


async def test_a_body_of_which_nothing_came_is_not_asked_for_again(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    tries: list[int] = []

    def cut() -> int:
        tries.append(0)
        return 10

    async with breaking(place.server.port, cut) as url:
        with pytest.raises(Unreachable):
            await fetch(url, empty())
    assert len(tries) <= 2  # aiohttp itself dials again where no answer began


async def test_a_body_that_stays_away_is_given_up(place: ServedFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.fabric.transfer.RESUME_S", 0.0)
    await place.open()
    place.handlers.fragments[0] = BODY
    cuts = iter([50_000] + [10] * 1000)
    async with breaking(place.server.port, lambda: next(cuts)) as url:
        with pytest.raises(Unreachable):
            await fetch(url, empty())


# ---- hostile readers ------------------------------------------------------------------------------------------------

NAMED = {"Atoll-Version": "3", "Atoll-Digest": compute_digest(BODY)}
WRONG = {
    "past the end": ({"Range": f"bytes={len(BODY)}-", **NAMED}, 416, f"there is no byte {len(BODY)}"),
    "far past it": ({"Range": f"bytes={10**14}-", **NAMED}, 416, "there is no byte"),
    "negative": ({"Range": "bytes=-5", **NAMED}, 400, "is not understood"),
    "huge": ({"Range": f"bytes={10**400}-", **NAMED}, 400, "is not understood"),
    "with an end": ({"Range": "bytes=1-2", **NAMED}, 400, "is not understood"),
    "several": ({"Range": "bytes=1-,3-", **NAMED}, 400, "is not understood"),
    "of no version": ({"Range": "bytes=1-"}, 400, "a range is of a whole version"),
    "of version −1": ({"Range": "bytes=1-", **NAMED, "Atoll-Version": "-1"}, 400, "a range is of a whole version"),
    "of a huge one": (
        {"Range": "bytes=1-", **NAMED, "Atoll-Version": "1" * 41},
        400,
        "a range is of a whole version",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_range_that_cannot_be_is_refused_with_its_reason(place: ServedFabric, name: str) -> None:
    headers, status, reason = WRONG[name]
    await place.open()
    place.handlers.fragments[0] = BODY
    answer = await place.request("GET", "/v1/fragments/0", headers=headers)
    assert answer[0] == status
    assert reason in answer[1]
    assert place.handlers.held == 0


async def test_a_range_of_steps_is_refused(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    status, reason = await place.request("GET", "/v1/fragments/0?have=1", headers={"Range": "bytes=1-", **NAMED})
    assert (status, "a range is of a whole version" in reason) == (400, True)


# ---- hostile syncers ------------------------------------------------------------------------------------------------


def answer(status: str, at: int, *, version: int = 3, digest: str = "", size: int | None = None) -> bytes:
    rest = BODY[at:]
    head = [
        f"HTTP/1.1 {status}",
        f"Atoll-Version: {version}",
        "Atoll-Round: 7",
        f"Atoll-Digest: {digest or compute_digest(BODY)}",
        f"Content-Length: {len(rest) if size is None else size}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + rest


AT = 1000
LIES = {
    "a part of another version": answer("206 Partial Content", AT, version=4),
    "a part of other bytes": answer("206 Partial Content", AT, digest="0" * 32),
    "a part that begins elsewhere": answer("206 Partial Content", AT + 1),
    "a whole of another length": answer("200 OK", 0, size=len(BODY) + 1),
    "a part without an end": answer("206 Partial Content", AT, size=10**15),
}


@asynccontextmanager
async def telling(*answers: bytes) -> AsyncIterator[str]:
    """A server that says these, one a connection."""
    left = list(answers)

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(tell, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def begun() -> bytes:
    """The first `AT` bytes, then a break."""
    whole = answer("200 OK", 0)
    return whole[: len(whole) - len(BODY) + AT]


@pytest.mark.parametrize("lie", LIES)
async def test_a_syncer_that_goes_on_with_something_else_is_a_peer_error(lie: str) -> None:
    async with telling(begun(), LIES[lie]) as url:
        with pytest.raises(PeerError):
            await fetch(url, empty())


async def test_a_part_that_nobody_asked_for_is_a_peer_error() -> None:
    async with telling(answer("206 Partial Content", AT)) as url:
        with pytest.raises(PeerError):
            await fetch(url, empty())


async def test_what_goes_on_with_other_bytes_is_found_by_the_digest_of_the_whole() -> None:
    spoilt = bytearray(answer("206 Partial Content", AT))
    spoilt[-1] ^= 1
    async with telling(begun(), bytes(spoilt)) as url:
        with pytest.raises(PeerError, match="has digest"):
            await fetch(url, empty())
