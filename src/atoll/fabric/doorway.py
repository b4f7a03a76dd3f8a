"""Connections as they come in: counted, timed, and, where the port is secured, spoken to in TLS only.

Rules:
- a connection is a stranger from its first packet until its first request has come whole (and, where tokens are asked
  for, has shown one); it has `header_s` for that, the TLS handshake included;
- so many strangers at once; one more costs a stranger of the address that has the most its place: the oldest that has
  not said a word, or else the oldest. So a flood takes places from itself, and one of half-open connections takes none
  from whoever comes in properly;
- so many connections in all, and of one address; more are closed unread;
- who speaks plain HTTP to a TLS port is told so in plain HTTP, and closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from atoll.fabric.wire import Limits, one_line
from atoll.protocol.errors import ConfigError

TLS_HANDSHAKE = 0x16
"""The first byte of a TLS connection."""
PLAIN = b"this port speaks TLS: use https://, or the join link\n"
BACKLOG = 1024
TOGETHER = 16
"""Connections that are let in before everybody else has a turn."""

Connection = asyncio.Protocol
Made = Callable[[], Connection]
Tls = Callable[[], ssl.SSLContext]
"""Asked for every handshake: certificates are renewed while a run goes on."""


@dataclass(eq=False)
class Stranger:
    address: str
    spoke: bool = False
    """In TLS, its first byte is here."""
    task: asyncio.Task[None] | None = None
    connection: Connection | None = None
    timer: asyncio.TimerHandle | None = None


class Doorway:
    def __init__(
        self,
        limits: Limits,
        tls: Tls | None,
        make: Made,
        there: Callable[[], Iterable[Connection]],
        close: Callable[[Connection], None],
    ) -> None:
        """`make` one connection's protocol; `there` are those that are open; `close` one of them."""
        self._limits, self._tls, self._make, self._there, self._shut = limits, tls, make, there, close
        self._strangers: dict[Stranger, None] = {}
        self._by_connection: dict[Connection, Stranger] = {}
        self._addresses: Counter[str] = Counter()
        """Connections by address, those of late that are closed already included."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.turned_away = 0

    async def open(self, host: str, port: int) -> int:
        """The port that it listens on."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        except (OSError, UnicodeError) as error:
            raise ConfigError(_unbindable(host, port, error)) from error
        self._listener.setblocking(False)
        self._accepting = loop.create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        for stranger in list(self._strangers):
            self._drop(stranger)

    def heard(self, connection: Connection) -> None:
        """Its first request is here, and may be asked."""
        if (stranger := self._by_connection.pop(connection, None)) is not None:
            self._forget(stranger)

    # ---- coming in ------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in count(1):
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # no more descriptors, or it went before it was here
                await asyncio.sleep(0.05)
                continue
            if self._room(str(address[0])):
                self._greet(sock, str(address[0]))
            else:
                self.turned_away += 1
                sock.close()
            if number % TOGETHER == 0:
                await asyncio.sleep(0)  # where many wait, accepting does not: everybody else has a turn in between

    def _room(self, address: str) -> bool:
        limits = self._limits
        if (
            sum(self._addresses.values()) >= limits.connections
            or self._addresses[address] >= limits.address_connections
        ):
            self._recount()
        if (
            sum(self._addresses.values()) >= limits.connections
            or self._addresses[address] >= limits.address_connections
        ):
            return False
        if len(self._strangers) >= limits.strangers:
            self.turned_away += 1
            self._drop(self._oldest_of_the_most())
        return True

    def _greet(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        stranger = Stranger(address)
        self._strangers[stranger] = None
        self._addresses[address] += 1
        stranger.timer = loop.call_later(self._limits.header_s, self._drop, stranger)
        stranger.task = loop.create_task(self._enter(stranger, sock))
        stranger.task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)

    async def _enter(self, stranger: Stranger, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def made() -> Connection:
            stranger.connection = connection = self._make()
            self._by_connection[connection] = stranger
            return connection

        try:
            if self._tls is None:
                await loop.connect_accepted_socket(made, sock)
            elif await self._first_byte(stranger, sock) == TLS_HANDSHAKE:
                limits = self._limits
                await loop.connect_accepted_socket(
                    made,
                    sock,
                    ssl=self._tls(),
                    ssl_handshake_timeout=limits.header_s,
                    ssl_shutdown_timeout=limits.flush_s,
                )
            else:
                _say_plainly(sock)
                self._forget(stranger)
        except (OSError, ssl.SSLError):  # a TimeoutError is one: gone, slow, or not speaking TLS 1.3 as we do
            sock.close()
            self._forget(stranger)
        finally:
            stranger.task = None

    async def _first_byte(self, stranger: Stranger, sock: socket.socket) -> int:
        """Without taking it; a connection that never says anything costs no more than this."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sock, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(sock)
        first = sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError("it went without a word")
        stranger.spoke = True
        return first[0]

    # ---- going ----------------------------------------------------------------------------------------------------

    def _drop(self, stranger: Stranger) -> None:
        self._forget(stranger)
        if stranger.task is not None:
            stranger.task.cancel()
        if stranger.connection is not None:
            self._shut(stranger.connection)

    def _forget(self, stranger: Stranger) -> None:
        self._strangers.pop(stranger, None)
        if stranger.timer is not None:
            stranger.timer.cancel()
        if stranger.connection is not None:
            self._by_connection.pop(stranger.connection, None)

    def _oldest_of_the_most(self) -> Stranger:
        most = Counter(stranger.address for stranger in self._strangers).most_common(1)[0][0]
        theirs = (stranger for stranger in self._strangers if stranger.address == most)
        return min(theirs, key=lambda stranger: stranger.spoke)  # the first of those that are least

    def _recount(self) -> None:
        open_now: Counter[str] = Counter(
            address for connection in self._there() if (address := address_of(connection)) is not None
        )
        open_now.update(
            stranger.address
            for stranger in self._strangers
            if stranger.task is not None and (stranger.connection is None or address_of(stranger.connection) is None)
        )
        self._addresses = open_now


def address_of(connection: asyncio.BaseProtocol) -> str | None:
    """None for one that is closed."""
    transport: asyncio.BaseTransport | None = getattr(connection, "transport", None)
    name = transport.get_extra_info("peername") if transport is not None else None
    return str(name[0]) if name else None


def _say_plainly(sock: socket.socket) -> None:
    head = f"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: {len(PLAIN)}\r\n\r\n".encode()
    with suppress(OSError):
        sock.recv(65536)  # what lies unread at a close would take the answer with it
        sock.send(head + PLAIN)
        sock.shutdown(socket.SHUT_WR)
    sock.close()


def _unbindable(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return one_line(f"{host!r} is no name or address of this machine: bind to one with --bind")
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: choose another with --port, or 0 for any"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return one_line(f"{host} is no address of this machine ({error.strerror or error}): bind to one with --bind")
    return one_line(f"port {port} on {host} cannot be bound ({error.strerror or error}): choose another with --port")
