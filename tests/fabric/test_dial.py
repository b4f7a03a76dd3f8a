from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.connect_proxy import FAR, ConnectProxy
from tests.fabric.conftest import ServedFabric
from tests.fabric.secured import Secured, secured_server

from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.calls import dial
from atoll.fabric.certificates import days_left
from atoll.protocol.errors import Unreachable


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_server(tmp_path) as place:
        yield place


async def complaint(address: SyncerAddress, deadline_s: float = 5.0) -> str:
    with pytest.raises(Unreachable) as caught:
        await dial(address, address.urls[0], deadline_s)
    await asyncio.sleep(0.01)  # a closed transport lets go of its socket in a later turn of the loop
    return str(caught.value)


async def test_every_step_is_timed_and_the_certificate_is_seen(secured: Secured) -> None:
    found = await dial(parse_address(secured.link(), {}), secured.url, 5.0)
    assert found.reach_s > 0 and found.handshake_s > 0 and found.cipher.startswith("TLS_")
    assert found.fingerprint == secured.pin and days_left(found.certificate) == pytest.approx(30, abs=0.1)


async def test_in_the_clear_there_is_nothing_to_shake_hands_on(place: ServedFabric) -> None:
    await place.open()
    found = await dial(parse_address(place.url, {}), place.url, 5.0)
    assert found.reach_s > 0 and found.handshake_s == 0 and found.cipher == ""


async def test_the_proxy_resolves_the_name(secured: Secured) -> None:
    async with ConnectProxy().open() as proxy:
        address = parse_address(secured.link(host=FAR), {"HTTPS_PROXY": proxy.url})
        assert (await dial(address, address.urls[0], 5.0)).fingerprint == secured.pin
        await asyncio.sleep(0.01)
    assert proxy.asked_for == [f"{FAR}:{secured.server.port}"]


async def test_who_is_at_fault_is_named(secured: Secured) -> None:
    assert "somebody else answers there" in await complaint(parse_address(secured.link(pin="ab" * 32), {}))
    await secured.server.stop()
    assert await complaint(parse_address(secured.link(), {})) == "Connection refused"
    async with ConnectProxy().open() as proxy:
        said = await complaint(parse_address(secured.link(), {"ATOLL_PROXY": proxy.url}))
        assert said == f"the proxy 127.0.0.1:{proxy.port} does not let us through: 502 Bad Gateway"


@pytest.mark.parametrize("words", [b"", b"220 smtp.example\r\n\r\n", b"x" * 40_000])
async def test_a_proxy_that_is_none_is_an_error_of_one_line(secured: Secured, words: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    said = await complaint(parse_address(secured.link(), {"ATOLL_PROXY": f"http://127.0.0.1:{port}"}), 0.3)
    server.close()
    assert said and "\n" not in said and len(said) < 300


async def test_nobody_waits_for_ever(secured: Secured) -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    assert await complaint(parse_address(secured.link(port=port), {}), 0.1) == "no answer within 0.1 s"
    silent.close()
    for writer in held:
        writer.transport.abort()
    await asyncio.sleep(0.01)
