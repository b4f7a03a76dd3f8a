"""Connections as they come in: counted, timed, and, on a secured port, spoken to in TLS only.

Rules:
- a connection is a stranger from its first packet until its first request has come whole (and, where tokens are asked
  for, has shown one); it has `header_s` for that, the TLS handshake included;
- a connection takes a place when it is accepted, and gives it back when it is closed;
- there are so many places for strangers. One stranger more costs another its place: of the address that has the most
  of them, of those that have come equally far (silent, spoke, past the TLS handshake) the most numerous, the oldest. So
  a flood takes places from itself, and a proper client is through long before it is the oldest;
- an address where a learner is connected, or was lately, has places that strangers of other addresses cannot take;
- connections are bounded in all, per address, and per token; a viewer's token has few, so that most are learners';
- whatever fails while one connection comes in closes that connection; accepting itself is vital (see `tasks`);
- whoever speaks plain HTTP to a TLS port is told so in plain HTTP, and closed.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NoReturn

from atoll.fabric.tasks import ConnectionErrors, VitalTasks, start_for_connection
from atoll.fabric.wire import FabricLimits, one_line
from atoll.protocol.errors import ConfigError

TLS_HANDSHAKE = 0x16
"""The first byte of a TLS connection."""
PLAIN = b"this port speaks TLS: use https://, or the join link\n"
BACKLOG = 1024
TOGETHER = 16
"""Connections that are let in before everybody else has a turn."""
NO_LISTENER = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""Whatever else accepting fails with passes."""

Made = Callable[[], asyncio.Protocol]
Tls = Callable[[], ssl.SSLContext]
"""Asked for every handshake: certificates are renewed while a run goes on."""


@dataclass(eq=False)
class IncomingConnection:
    """A connection and its place."""

    place: ConnectionPlace
    task: asyncio.Task[None] | None = None
    """Brings it in: the first byte, the TLS handshake."""
    connection: asyncio.Protocol | None = None
    timer: asyncio.TimerHandle | None = None


class Listener:
    def __init__(
        self,
        limits: FabricLimits,
        tls: Tls | None,
        make: Made,
        close: Callable[[asyncio.Protocol], None],
        vital: VitalTasks | None = None,
        mistakes: ConnectionErrors | None = None,
    ) -> None:
        """`make` one connection's protocol; `close` one of them. `vital` hears when accepting fails."""
        self._limits, self._tls, self._make, self._shut = limits, tls, make, close
        self._vital, self._mistakes = vital or VitalTasks(), mistakes or ConnectionErrors()
        self.places = ConnectionPlaces(limits)
        self._entries: dict[ConnectionPlace, IncomingConnection] = {}
        self._by_connection: dict[asyncio.Protocol, IncomingConnection] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[NoReturn] | None = None
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
        self._accepting = self._vital.start("accept", partial(self._accept, self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        for place in list(self.places.strangers):
            self._drop(self._entries[place])

    def admit(self, connection: asyncio.Protocol, token: str, *, viewer: bool) -> bool:
        """Its first request is here, and may be asked. Whether there is a place for one more of its token."""
        if (entry := self._by_connection.get(connection)) is None:
            return False  # it is closed already
        if not self.places.admit(entry.place, token, viewer=viewer):
            return False
        if entry.timer is not None:
            entry.timer.cancel()
        return True

    # ---- coming in ------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Not by loop.sock_accept: where that is cancelled as somebody comes, asyncio raises in a callback."""
        loop, ready, descriptor = asyncio.get_running_loop(), asyncio.Event(), listener.fileno()
        loop.add_reader(descriptor, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                if not self._accept_waiting(listener):
                    await asyncio.sleep(0.05)
        finally:
            loop.remove_reader(descriptor)

    def _accept_waiting(self, listener: socket.socket) -> bool:
        """Those that wait, but not so many that nobody else has a turn; False: not now."""
        for _ in range(TOGETHER):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in NO_LISTENER:
                    raise
                return False  # no more descriptors, or it went before it was here
            sock.setblocking(False)
            self._greet(sock, str(address[0]))
        return True

    def _greet(self, sock: socket.socket, address: str) -> None:
        if not self.places.has_room(address):
            self.turned_away += 1
            sock.close()
            return
        loop = asyncio.get_running_loop()
        if (dropped := self.places.one_to_drop(loop.time())) is not None:
            self.turned_away += 1
            self._drop(self._entries[dropped])
        entry = IncomingConnection(self.places.take_place(address))
        self._entries[entry.place] = entry
        entry.timer = loop.call_later(self._limits.header_s, self._drop, entry)
        entry.task = start_for_connection(partial(self._enter, entry, sock), partial(self._drop, entry), self._mistakes)
        entry.task.add_done_callback(lambda task: self._entered(entry, sock))

    async def _enter(self, entry: IncomingConnection, sock: socket.socket) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(lambda: self._watched(entry), sock)
            elif await self._first_byte(entry, sock) == TLS_HANDSHAKE:
                await loop.connect_accepted_socket(
                    lambda: self._watched(entry),
                    sock,
                    ssl=self._tls(),
                    ssl_handshake_timeout=limits.header_s,
                    ssl_shutdown_timeout=limits.flush_s,
                )
            else:
                _say_plainly(sock)
        except (OSError, ssl.SSLError):
            pass  # a TimeoutError is one: gone, slow, or not speaking TLS 1.3 as we do

    def _entered(self, entry: IncomingConnection, sock: socket.socket) -> None:
        """It is in, and its place is given back when it is lost; or it never was."""
        entry.task = None
        if entry.connection is None:
            sock.close()
            self._gone(entry)

    async def _first_byte(self, entry: IncomingConnection, sock: socket.socket) -> int:
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
        self.places.advance(entry.place, ConnectionStage.SPOKE)
        return first[0]

    def _watched(self, entry: IncomingConnection) -> WatchedProtocol:
        inner = self._make()
        return WatchedProtocol(inner, partial(self._came, entry, inner), partial(self._lost, entry, inner))

    def _came(self, entry: IncomingConnection, connection: asyncio.Protocol) -> None:
        self.places.advance(entry.place, ConnectionStage.SPOKE if self._tls is None else ConnectionStage.SECURED)
        entry.connection = connection
        self._by_connection[connection] = entry

    # ---- going ----------------------------------------------------------------------------------------------------

    def _drop(self, entry: IncomingConnection) -> None:
        """Its place is free once it is closed, which is at once, or for a TLS that is being closed within `flush_s`."""
        self.places.dismiss(entry.place)
        if entry.connection is not None:
            with self._mistakes.caught():
                self._shut(entry.connection)
        elif entry.task is not None:
            entry.task.cancel()

    def _lost(self, entry: IncomingConnection, connection: asyncio.Protocol, error: Exception | None) -> None:
        self._gone(entry)
        with self._mistakes.caught():
            connection.connection_lost(error)

    def _gone(self, entry: IncomingConnection) -> None:
        self.places.give_back(entry.place, asyncio.get_running_loop().time())
        self._entries.pop(entry.place, None)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.connection is not None:
            self._by_connection.pop(entry.connection, None)


class WatchedProtocol(asyncio.Protocol):
    """A connection's protocol; the listener hears first when the connection is made, and tells it that it is lost."""

    def __init__(
        self, inner: asyncio.Protocol, made: Callable[[], None], lost: Callable[[Exception | None], None]
    ) -> None:
        self._inner, self._made, self._lost = inner, made, lost
        self.last_read = 0
        """Bytes of the last read."""
        self.keeps: Callable[[int], bool] | None = None
        """Whether a read of so many bytes is handed on; None: all are."""
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.last_read = len(data)
        if self.keeps is None or self.keeps(len(data)):
            self._inner.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(error)


def _say_plainly(sock: socket.socket) -> None:
    head = f"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: {len(PLAIN)}\r\n\r\n".encode()
    with suppress(OSError):
        sock.recv(65536)  # what lies unread at a close would take the answer with it
        sock.send(head + PLAIN)
        sock.shutdown(socket.SHUT_WR)
    sock.close()


def allow_files() -> None:
    """Raise the limit of open files to the most allowed: every connection is one, and 1024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_port(host: str, port: int, choose: str = "--set port=7077") -> None:
    """ConfigError where nothing can listen there just now. Nobody is let in for that. `choose`: option that names
    another port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(_unbindable(host, port, error, choose)) from error


def _unbindable(host: str, port: int, error: OSError | UnicodeError, choose: str = "--set port=7077") -> str:
    if isinstance(error, UnicodeError):
        return one_line(f"{host!r} is no name or address of this machine: bind to one with --bind")
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: choose another ({choose}), or 0 for any"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return one_line(f"{host} is no address of this machine ({error.strerror or error}): bind to one with --bind")
    return one_line(f"port {port} on {host} cannot be bound ({error.strerror or error}): choose another")


# ---- places ---------------------------------------------------------------------------------------------------------

KNOWN_S = 600.0
"""An address counts as a learner's for this long after its last connection was closed."""
KNOWN_SHARE = 8
"""Of all strangers' places, one part in so many is kept for each address of a learner."""


class ConnectionStage(IntEnum):
    """How far a stranger has come."""

    SILENT = 0
    SPOKE = 1
    """Its first byte is here."""
    SECURED = 2
    """The TLS handshake is over."""


@dataclass(eq=False, slots=True)
class ConnectionPlace:
    address: str
    stage: ConnectionStage = ConnectionStage.SILENT
    token: str | None = None
    """The name of what it has shown; None: a stranger."""
    learner: bool = False
    taken: bool = True


class ConnectionPlaces:
    def __init__(self, limits: FabricLimits) -> None:
        self._limits = limits
        self.strangers: dict[ConnectionPlace, None] = {}
        self._waiting: dict[str, dict[ConnectionStage, dict[ConnectionPlace, None]]] = {}
        """The same by address and stage, in the order in which they came: in a flood one is looked for often."""
        self._taken = 0
        self._addresses: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._learners: Counter[str] = Counter()
        """Learners' connections, by address."""
        self._known_until: dict[str, float] = {}
        """Addresses of learners that have gone; the one that went last is the last."""

    def __len__(self) -> int:
        return self._taken

    def has_room(self, address: str) -> bool:
        """Whether one more connection of this address may come in at all."""
        limits = self._limits
        return self._taken < limits.connections and self._addresses[address] < limits.address_connections

    def take_place(self, address: str) -> ConnectionPlace:
        place = ConnectionPlace(address)
        self.strangers[place] = None
        self._waiting.setdefault(address, {stage: {} for stage in ConnectionStage})[place.stage][place] = None
        self._taken += 1
        self._addresses[address] += 1
        return place

    def advance(self, place: ConnectionPlace, stage: ConnectionStage) -> None:
        """A stranger has come further."""
        if place in self.strangers:
            waiting = self._waiting[place.address]
            del waiting[place.stage][place]
            waiting[stage][place] = None
        place.stage = stage

    def admit(self, place: ConnectionPlace, token: str, *, viewer: bool) -> bool:
        """A stranger has shown its token. Whether there is a place for one more of that token."""
        if place.token is not None:
            return True
        limits = self._limits
        if self._tokens[token] >= (limits.viewer_connections if viewer else limits.token_connections):
            return False
        self.dismiss(place)
        place.token, place.learner = token, not viewer
        self._tokens[token] += 1
        if place.learner:
            self._learners[place.address] += 1
        return True

    def dismiss(self, place: ConnectionPlace) -> None:
        """A stranger that is being closed, or is none any more, stands in nobody's way."""
        if place in self.strangers:
            del self.strangers[place]
            waiting = self._waiting[place.address]
            del waiting[place.stage][place]
            if not any(waiting.values()):
                del self._waiting[place.address]

    def give_back(self, place: ConnectionPlace, now: float) -> None:
        """Its connection is closed. A second time changes nothing."""
        if not place.taken:
            return
        place.taken = False
        self.dismiss(place)
        self._taken -= 1
        _count_down(self._addresses, place.address)
        if place.token is not None:
            _count_down(self._tokens, place.token)
        if place.learner:
            _count_down(self._learners, place.address)
            self._remember(place.address, now)

    def one_to_drop(self, now: float) -> ConnectionPlace | None:
        """The stranger that has to go before another may come; None: there is room."""
        if len(self.strangers) < self._limits.strangers:
            return None
        kept = self._limits.strangers // KNOWN_SHARE

        def crowd(address: str) -> int:
            return sum(map(len, self._waiting[address].values())) - kept * self.knows(address, now)

        stages = self._waiting[max(self._waiting, key=crowd)]
        theirs = max(stages.values(), key=len)
        return next(iter(theirs))

    def knows(self, address: str, now: float) -> bool:
        """Whether a learner is there, or was lately."""
        return address in self._learners or self._known_until.get(address, now) > now

    def _remember(self, address: str, now: float) -> None:
        self._known_until.pop(address, None)
        self._known_until[address] = now + KNOWN_S
        if len(self._known_until) > self._limits.connections:
            del self._known_until[next(iter(self._known_until))]


def _count_down(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
