"""Connections as they come in: how many, for how long, and what becomes of the rest."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.fabric.certificates import fingerprint, make_server
from atoll.fabric.listener import TOGETHER, Listener
from atoll.fabric.tls import client_context, server_context
from atoll.fabric.wire import FabricLimits
from atoll.protocol.errors import ConfigError

WAIT_S = 10.0


class Guest(asyncio.Protocol):
    """Hears one line; `hello` lets it in, whatever it says is answered."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.house.guests.add(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if data == b"hello":
            self.house.door.admit(self, "", viewer=False)
        self.transport.write(b"you said " + data)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.house.guests.discard(self)


class House:
    def __init__(self) -> None:
        self.guests: set[Guest] = set()
        self._open: list[socket.socket] = []

    async def opened(self, limits: FabricLimits, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> int:
        shown = None if tls is None else lambda: tls
        self.door = Listener(limits, shown, lambda: Guest(self), self._close)
        self.port = await self.door.open(host, 0)
        return self.port

    @staticmethod
    def _close(guest: asyncio.Protocol) -> None:
        assert isinstance(guest, Guest)
        if guest.transport is not None:
            guest.transport.abort()

    async def knock(self, address: str = "127.0.0.1") -> socket.socket:
        """A connection that says nothing, from this address of ours."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((address, 0))
        self._open.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - nobody tells when it becomes true
                await asyncio.sleep(0.001)

    @property
    def strangers(self) -> int:
        return len(self.door.places.strangers)

    async def closed(self) -> None:
        await self.door.close()
        for guest in list(self.guests):
            self._close(guest)
        for sock in self._open:
            sock.close()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.closed()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    made = make_server(["localhost"], 1.0)
    certificate, key = tmp_path / "syncer.crt", tmp_path / "syncer.key"
    certificate.write_bytes(made.certificate)
    key.write_bytes(made.key)
    return server_context(certificate, key), fingerprint(made.certificate)


async def say(sock: socket.socket, data: bytes) -> bytes:
    """What is answered; empty: it was closed."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(WAIT_S):
            if data:
                await loop.sock_sendall(sock, data)
            return await loop.sock_recv(sock, 65536)
    except ConnectionError:
        return b""


async def test_who_has_been_heard_may_stay(house: House) -> None:
    await house.opened(FabricLimits(header_s=0.1))
    polite, rude = await house.knock(), await house.knock()
    assert await say(polite, b"hello") == b"you said hello"
    assert await say(rude, b"") == b"", "it had a tenth of a second"
    assert await say(polite, b"again") == b"you said again"
    assert house.strangers == 0


async def test_saying_something_is_not_being_heard(house: House) -> None:
    await house.opened(FabricLimits(header_s=0.1))
    knocking = await house.knock()
    assert await say(knocking, b"h") == b"you said h"
    assert await say(knocking, b"") == b""


async def test_one_address_has_so_many_connections(house: House) -> None:
    await house.opened(FabricLimits(address_connections=2))
    ours = [await house.knock() for _ in range(3)]
    assert await say(ours[2], b"hello") == b"", "closed unread"
    other = await house.knock("127.0.0.2")
    assert await say(other, b"hello") == b"you said hello"
    assert [await say(sock, b"hello") for sock in ours[:2]] == [b"you said hello"] * 2
    ours[0].close()
    await house.until(lambda: len(house.guests) == 2)
    assert await say(await house.knock(), b"hello") == b"you said hello", "whoever went has left a place"
    assert house.door.turned_away == 1


async def test_all_together_have_so_many(house: House) -> None:
    await house.opened(FabricLimits(connections=3))
    for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        assert await say(await house.knock(address), b"hello")
    assert await say(await house.knock("127.0.0.4"), b"hello") == b""


async def test_strangers_take_places_from_their_own_kind(house: House) -> None:
    """A flood of one address costs the few of another nothing."""
    await house.opened(FabricLimits(strangers=8))
    quiet = await house.knock("127.0.0.2")
    await house.until(lambda: house.strangers == 1)
    flood = [await house.knock("127.0.0.1") for _ in range(50)]
    await house.until(lambda: house.door.turned_away == 43)
    assert house.strangers == 8
    assert await say(quiet, b"hello") == b"you said hello"
    assert [await say(sock, b"") for sock in flood[:43]] == [b""] * 43, "the oldest went first"
    assert await say(flood[-1], b"hello") == b"you said hello"


async def test_of_one_address_the_silent_go_first(house: House, pair: tuple[ssl.SSLContext, str]) -> None:
    await house.opened(FabricLimits(strangers=4), pair[0])
    speaks = await house.knock()
    await asyncio.get_running_loop().sock_sendall(speaks, b"\x16\x03\x01")
    await house.until(lambda: any(place.stage for place in house.door.places.strangers))
    for _ in range(20):
        await house.knock()
    await house.until(lambda: house.door.turned_away == 17)
    assert [place.stage for place in house.door.places.strangers] == [1, 0, 0, 0]


async def test_one_that_cannot_be_closed_costs_nobody_else_anything(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither whoever comes after it, nor those that its deadline falls among."""

    def broken(guest: asyncio.Protocol) -> None:
        house._close(guest)
        raise AttributeError("a transport in a state that nobody thought of")

    came: set[asyncio.Protocol] = set()

    def come() -> Guest:
        came.add(guest := Guest(house))
        return guest

    house.door = Listener(FabricLimits(strangers=1, header_s=0.2), None, come, broken)
    house.port = await house.door.open("127.0.0.1", 0)
    for number in (1, 2, 3):
        await house.knock()
        await house.until(lambda: len(came) == number)  # noqa: B023 - it is asked here and now
    await house.until(lambda: house.door._mistakes.count == 3)
    await house.until(lambda: len(house.door.places) == 0)
    assert await say(await house.knock(), b"hello") == b"you said hello"
    assert house.door._vital.error is None and "a mistake of ours" in caplog.text


async def test_nobody_waits_while_many_come(house: House) -> None:
    """Accepting does not hold the loop: a timer that is due comes between two of them."""
    await house.opened(FabricLimits(strangers=4))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    socks = [socket.socket() for _ in range(200)]
    house._open.extend(socks)
    for sock in socks:
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", house.port))
    counting = asyncio.get_running_loop().create_task(count())
    await house.until(lambda: house.door.turned_away == 196)
    counting.cancel()
    assert turns >= 200 // TOGETHER - 2  # its first turn may come late


async def test_who_speaks_plainly_to_a_tls_port_is_told_so(house: House, pair: tuple[ssl.SSLContext, str]) -> None:
    await house.opened(FabricLimits(), pair[0])
    sock = await house.knock()
    answer = await say(sock, b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b"this port speaks TLS" in answer
    assert await say(sock, b"") == b"" and house.strangers == 0 and not house.guests


async def test_tls_is_spoken_to_whoever_speaks_it(house: House, pair: tuple[ssl.SSLContext, str]) -> None:
    await house.opened(FabricLimits(), pair[0])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", house.port, ssl=client_context(pair[1]), server_hostname="localhost"
    )
    writer.write(b"hello")
    assert await reader.read(100) == b"you said hello"
    writer.close()
    await house.until(lambda: not house.guests)


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x00\xff" + b"\x00" * 100, b"\x16" * 1000])
async def test_a_handshake_that_does_not_end_is_ended(
    house: House, pair: tuple[ssl.SSLContext, str], said: bytes
) -> None:
    await house.opened(FabricLimits(header_s=0.2), pair[0])
    sock = await house.knock()
    if said:
        await asyncio.get_running_loop().sock_sendall(sock, said)
    async with asyncio.timeout(WAIT_S):
        while await say(sock, b""):
            pass  # an alert, perhaps
    await house.until(lambda: house.strangers == 0)
    assert not house.guests


async def test_a_connection_that_does_not_close_its_tls_is_cut(house: House, pair: tuple[ssl.SSLContext, str]) -> None:
    """One that ends the handshake and then neither asks, reads nor closes has left within its deadlines."""
    await house.opened(FabricLimits(header_s=0.3, flush_s=0.2), pair[0])
    sock = await house.knock()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(pair[1]).wrap_bio(incoming, outgoing)
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            incoming.write(await loop.sock_recv(sock, 65536))
    await loop.sock_sendall(sock, outgoing.read())
    await house.until(lambda: len(house.guests) == 1)
    await house.until(lambda: not house.guests)
    assert house.strangers == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_it_listens_on_ipv6(house: House) -> None:
    try:
        port = await house.opened(FabricLimits(), host="::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    reader, writer = await asyncio.open_connection("::1", port)
    writer.write(b"hello")
    assert await reader.read(100) == b"you said hello"
    writer.close()
    await house.until(lambda: not house.guests)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.77", "no address of this machine"),
        ("nowhere.invalid", "no address of this machine"),
        ("a..b", "no name or address"),
        ("x" * 70, "no name or address"),
    ],
)
async def test_an_address_that_is_not_ours_is_named(house: House, host: str, why: str) -> None:
    house.door = Listener(FabricLimits(), None, lambda: Guest(house), house._close)
    with pytest.raises(ConfigError, match=why) as caught:
        await house.door.open(host, 0)
    assert "--bind" in str(caught.value)


async def test_a_port_that_is_taken_is_named(house: House) -> None:
    port = await house.opened(FabricLimits())
    with pytest.raises(ConfigError, match=rf"port {port} is in use on 127.0.0.1"):
        await Listener(FabricLimits(), None, lambda: Guest(house), house._close).open("127.0.0.1", port)


async def test_one_that_comes_while_it_closes_is_no_mistake_of_ours(house: House) -> None:
    """In one turn of the loop: first somebody has it closed, then somebody comes."""
    port = await house.opened(FabricLimits())
    loop, mistakes = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda loop, context: mistakes.append(context))
    ours, theirs = socket.socketpair()
    await asyncio.sleep(0.01)  # it waits for connections now
    assert house.door._accepting is not None
    loop.add_reader(ours, house.door._accepting.cancel)
    theirs.send(b"!")
    with socket.create_connection(("127.0.0.1", port)):
        await asyncio.sleep(0.01)
        await house.door.close()
    loop.remove_reader(ours)
    ours.close()
    theirs.close()
    assert mistakes == []
