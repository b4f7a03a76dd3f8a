"""Whatever bytes come to a server's port: it goes on serving an honest learner, raises nothing that nobody catches, and
holds its memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.fabric.frames import Frames, Pieces
from tests.fabric.fuzz import resident_mib

from atoll.fabric.wire import FabricLimits
from atoll.protocol.messages import Heartbeat

if TYPE_CHECKING:
    from .conftest import Learner, ServedFabric

GROWN_MIB = 128.0
"""Of those that talk at once each may have a frame of 4 MiB on its way."""
AT_ONCE = 64
SILENT_S = 0.1
SETTLE = 500
"""Connections before memory is looked at for the first time."""
LIMITS = FabricLimits(hello_s=0.5, header_s=0.5, flush_s=0.5, ping_s=2.0, keepalive_s=1.0)


@asynccontextmanager
async def nothing_unhandled(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    loop, found = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda loop, context: found.append(context))
    with caplog.at_level(logging.WARNING):
        yield
    loop.set_exception_handler(None)
    said = [record.getMessage() + (record.exc_text or "") for record in caplog.records]
    assert (found, said) == ([], [])


async def one(port: int, pieces: Pieces) -> None:
    """Say it all, hear what is answered until nothing more comes, and go."""
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(5) as patience:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                clock = asyncio.get_running_loop().time
                patience.reschedule(clock() + SILENT_S)
                while await reader.read(1 << 16):
                    patience.reschedule(clock() + SILENT_S)
        finally:
            writer.transport.abort()


async def honest(place: ServedFabric, learner: Learner, over: asyncio.Event) -> int:
    """Says heartbeat after heartbeat, each of which the desk must hear before the next; how many there were."""
    beats = 0
    while not over.is_set():
        beats += 1
        assert learner.link.send(Heartbeat(clock={"honest": beats})), "an honest learner lost its channel"
        async with asyncio.timeout(10):
            while place.handlers.heard.get("honest", 0) < beats:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    return beats


def listen(place: ServedFabric) -> None:
    """Handlers that count what they hear of the honest learner and the channels that others open."""
    place.handlers.heard = {"others": 0}  # type: ignore[attr-defined]

    def note(*what: Any) -> None:
        place.handlers.heard["others"] += what[0] == "opened" and what[1] != "honest"  # type: ignore[attr-defined]
        if what[:2] == ("received", "honest"):
            place.handlers.heard["honest"] = what[2].clock["honest"]  # type: ignore[attr-defined]

    place.handlers.note = note  # type: ignore[method-assign]


async def storm(place: ServedFabric, connections: Sequence[Pieces] | Iterator[Pieces]) -> float:
    """All of them, some at a time; by how many MiB memory grew after the first few hundred."""
    waiting, before, most = iter(connections), 0.0, 0.0
    count = 0

    async def dial() -> None:
        nonlocal before, most, count
        for pieces in waiting:
            await one(place.server.port, pieces)
            count += 1
            if count == SETTLE:
                before = resident_mib()
            if count % 50 == 0:
                most = max(most, resident_mib())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(dial())
    return most - before


async def weather(place: ServedFabric, caplog: pytest.LogCaptureFixture, count: int, seed: int) -> None:
    await place.open(LIMITS)
    place.handlers.fragments[0] = b"some bytes"
    learner = await place.joined("honest", "s")
    listen(place)
    over = asyncio.Event()
    async with nothing_unhandled(caplog), asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(honest(place, learner, over))
        grown = await storm(place, Frames(seed).connections(count))
        over.set()
    print(f"{count} connections, {beats.result()} heartbeats, {place.server.bad_frames} bad frames, {grown:.1f} MiB")
    assert beats.result() > count // 200
    assert place.server.bad_frames > count // 20, "too tame"
    assert place.handlers.heard["others"] > count // 5, "too few get past the hello"  # type: ignore[attr-defined]
    assert grown <= GROWN_MIB
    assert learner.lost.empty()
    assert (await place.request("GET", "/v1/status"))[0] == 200


async def test_no_bytes_disturb_a_server(place: ServedFabric, caplog: pytest.LogCaptureFixture) -> None:
    await weather(place, caplog, 800, seed=1)


@pytest.mark.faults
async def test_many_bytes_do_not_disturb_a_server(place: ServedFabric, caplog: pytest.LogCaptureFixture) -> None:
    await weather(place, caplog, 40_000, seed=1000)
