"""Strangers at a TLS port: they never stop it, and cost honest neighbours of the same address nothing."""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
import time
from contextlib import suppress

import msgspec
import pytest
from tests.syncer.conftest import WAIT_S

from atoll.fabric.wire import FabricLimits

from .fort import SHORT, TOKENS, Fort

FLOOD_S = 3.0


async def silent_learner(fort: Fort) -> asyncio.StreamWriter:
    """A control channel that is opened and then answers nothing, not even the end of its TLS."""
    _, writer = await fort.raw()
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /v1/control HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['join'].secret}\r\n"
        f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    return writer


async def test_a_port_goes_on_accepting_while_a_tls_connection_is_being_closed(fort: Fort) -> None:
    """Its peer answers nothing, so it is closed twice over and hangs in between; bare connects come meanwhile."""
    await fort.open(msgspec.structs.replace(SHORT, address_connections=24, flush_s=30.0))
    before, server = await fort.digest(), fort.stage.service.server
    # For those that come now: on a busy machine an honest learner would not answer within half of it.
    server._control._limits = msgspec.structs.replace(server._control._limits, ping_s=0.1)
    for _ in range(3):
        await silent_learner(fort)
    assert server._runner is not None and server._runner.server is not None
    there = server._runner.server.connections
    await fort.until(lambda: sum(one.transport is not None and one.transport.is_closing() for one in there) > 0)
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", fort.port)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    assert (await fort.request("GET", "/v1/status", "join"))[0] == 200
    assert server.mistakes.count == 0 and server.vital.error is None
    await fort.unharmed(before)


async def shakes(fort: Fort, context: ssl.SSLContext, words: bytes) -> None:
    """One connection after the other: a handshake, a word or none, and gone."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", fort.port, ssl=context, server_hostname="localhost"
            )
            if words:
                writer.write(words)
                await reader.read(16)
            writer.transport.abort()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"", id="no word", marks=pytest.mark.faults),
        pytest.param(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", id="no token"),
    ],
)
async def test_who_is_gone_keeps_no_place_from_a_neighbour(fort: Fort, words: bytes) -> None:
    """Many more handshakes than there are places for strangers, from the very address of whoever is honest."""
    await fort.open(msgspec.structs.replace(SHORT, header_s=5.0, strangers=8))
    server, context = fort.stage.service.server, fort.context()
    floods = [asyncio.create_task(shakes(fort, context, words)) for _ in range(3)]
    try:
        end, answers = time.monotonic() + FLOOD_S, 0
        while time.monotonic() < end:
            assert (await fort.request("GET", "/v1/status", "join"))[0] == 200
            answers += 1
    finally:
        for flood in floods:
            flood.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    assert answers > 10 and server.turned_away == 0


async def test_who_stays_takes_places_from_its_own_kind(fort: Fort) -> None:
    """Handshakes that say nothing more fill all places; a neighbour is through before it is the oldest of them."""
    await fort.open(msgspec.structs.replace(SHORT, header_s=60.0, strangers=32))
    held = [await fort.raw() for _ in range(40)]
    server = fort.stage.service.server
    assert server.turned_away >= 7

    async def one_more() -> None:
        while True:
            held.append(await fort.raw())

    flood = asyncio.create_task(one_more())
    try:
        for _ in range(20):
            assert (await fort.request("GET", "/v1/status", "join"))[0] == 200
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)


async def test_a_viewers_token_leaves_room_for_learners(fort: Fort) -> None:
    """Connections that stay open under a viewer's token: it has few, and a learner still comes in."""
    await fort.open(msgspec.structs.replace(SHORT, connections=40, address_connections=40, viewer_connections=16))
    words = f"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['look'].secret}\r\n\r\n"
    answers: list[bytes] = []
    for _ in range(60):
        reader, writer = await fort.raw()
        writer.write(words.encode())
        async with asyncio.timeout(WAIT_S):
            answers.append((await reader.readline()).split(b" ")[1])
    assert answers == 16 * [b"200"] + 44 * [b"429"]
    assert (await fort.request("GET", "/v1/status", "join"))[0] == 200
    assert fort.stage.service.server.turned_away == 0


async def test_a_closed_connection_gives_its_place_back_at_once(fort: Fort) -> None:
    await fort.open(FabricLimits())
    server = fort.stage.service.server
    assert server._listener is not None
    places = server._listener.places
    before = len(places)
    for tls in (False, True):
        _, writer = await fort.raw(tls=tls)
        await fort.until(lambda: len(places) == before + 1)
        writer.transport.abort()
        await fort.until(lambda: len(places) == before)
        assert not places.strangers
