"""A port of this machine that answers, and the small server on one by which a courier gives its learner's state away.

    GET /v1/state/{ticket}   a body; headers Atoll-Size, Atoll-Digest; Range: bytes=START- for what is left of it

Rules:
- loopback only; so many connections, more are closed unread; headers within 5 s; every error is {"error": "one line"};
- a web page (an Origin header) is refused, unless the port says that it may read;
- only what is on offer is given, under a ticket that the syncer made and nobody can guess; nothing can be written;
- a state goes from the learner's own buffers to the socket, 1 MiB at a time; once withdrawn, they are not read again;
- a newcomer that reads too slowly is cut off. It asks for the rest, here or through the syncer (`relay`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from atoll.fabric.intake import Rejected
from atoll.fabric.security import check_loopback
from atoll.fabric.state import SIZE_HEADER, TICKET, resumed_at
from atoll.fabric.transfer import pieces
from atoll.fabric.wire import DIGEST_HEADER, Limits, one_line
from atoll.protocol.errors import ConfigError, PeerError

NEWCOMERS = 8
"""Connections to one courier at once: its learner's training comes first."""
COMING_S = 0.1
"""From a connection's acceptance to its transport, at most."""

_logger = logging.getLogger("atoll.fabric.http")
_logger.addFilter(lambda record: not _is_the_peers(record))

_RANGE = re.compile(r"bytes=([0-9]{1,15})-")

T = TypeVar("T")


class Port:
    """One listening port: bounded connections, a deadline on headers, one-line errors."""

    def __init__(self, host: str, port: int, limits: Limits) -> None:
        check_loopback(host)
        if not 0 <= port <= 65535:
            raise ConfigError(f"port = {port} is not between 0 and 65535: choose another with --port, or 0 for any")
        self.host = host
        self.port = port
        """As asked for; once it is open, as it is."""
        self._limits = limits
        self._unheard: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    def _pages_may(self, request: web.Request) -> bool:
        """Whether a web page may ask this."""
        return False

    async def _open(self, routes: Iterable[web.RouteDef]) -> None:
        limits = self._limits
        app = web.Application(middlewares=[self._answer], client_max_size=limits.score_bytes)
        app.add_routes(routes)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_logger,
            handle_signals=False,
            keepalive_timeout=limits.keepalive_s,
            lingering_time=limits.flush_s,
            shutdown_timeout=limits.flush_s,
            auto_decompress=False,
        )
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._accept, self.host, self.port, backlog=128)
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(_unbindable(self.host, self.port, error)) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for timer in self._unheard.values():
            timer.cancel()
        self._unheard.clear()

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._runner is not None
        server = self._runner.server
        if len(self._unheard) >= self._limits.connections:
            self._forget_closed()
        if server is None or max(len(server.connections), len(self._unheard)) >= self._limits.connections:
            return _Closed()
        connection = server()
        loop = asyncio.get_running_loop()
        self._unheard[connection] = loop.call_later(self._limits.header_s, self._unanswered, connection)
        return connection

    def _forget_closed(self) -> None:
        """Those that went without a request count no more. One without a transport that is younger is only coming."""
        oldest = asyncio.get_running_loop().time() - COMING_S
        for connection, timer in list(self._unheard.items()):
            if connection.transport is None and timer.when() - self._limits.header_s < oldest:
                timer.cancel()
                del self._unheard[connection]

    def _unanswered(self, connection: web.RequestHandler) -> None:
        del self._unheard[connection]
        connection.force_close()

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        timer = self._unheard.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        try:
            if "Origin" in request.headers and not self._pages_may(request):
                raise Rejected(403, "web pages may only read")
            if not all(value.isascii() for value in request.headers.values()):
                raise Rejected(400, "a header is not ASCII")  # aiohttp would stumble over it
            if "Sec-WebSocket-Protocol" in request.headers:
                raise Rejected(400, "no sub-protocol is spoken here")  # aiohttp would log all that are offered
            return await handler(request)
        except Rejected as error:
            return error_response(error.status, error)
        except PeerError as error:
            return error_response(409, error)
        except web.HTTPException as error:
            return error_response(error.status, error.reason)
        except ConnectionError as error:
            return error_response(400, error)  # to nobody: the peer went while it was being answered


@dataclass(frozen=True, slots=True)
class State:
    """What is said of a state that is sent, and the byte it is sent from."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Offer:
    parts: Sequence[memoryview]
    size: int
    digest: str
    readers: set[asyncio.Transport] = field(default_factory=set)


class Host(Port):
    """What a courier has on offer for newcomers that can reach it."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        super().__init__(host, port, msgspec.structs.replace(limits, connections=min(limits.connections, NEWCOMERS)))
        self.bytes_out = 0
        self._offers: dict[str, Offer] = {}

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        await self._open([web.get(f"/v1/state/{{ticket:{TICKET}}}", self._state, allow_head=False)])

    async def stop(self) -> None:
        for ticket in list(self._offers):
            self.withdraw(ticket)
        await self._close()

    def offer(self, ticket: str, parts: Sequence[memoryview], size: int, digest: str) -> None:
        """From now on these bytes, which must not change, are given to whoever brings the ticket."""
        assert re.fullmatch(TICKET, ticket) and size == sum(part.nbytes for part in parts) > 0
        self.withdraw(ticket)
        self._offers[ticket] = Offer(parts, size, digest)

    def withdraw(self, ticket: str) -> None:
        """The bytes may change again: whoever is reading them is cut off. A ticket that is not on offer is none."""
        if (offer := self._offers.pop(ticket, None)) is not None:
            for transport in offer.readers:
                transport.abort()

    async def _state(self, request: web.Request) -> web.StreamResponse:
        offer, transport = self._offers.get(request.match_info["ticket"]), request.transport
        if offer is None or transport is None:
            raise Rejected(404, "no state is on offer under this ticket: ask the syncer for another")
        start = resumed_at(range_start(request), offer.size)
        response = state_response(State(start, offer.size, offer.digest))
        transport.set_write_buffer_limits(0)  # a drain means sent, so little is on its way when an offer is withdrawn
        offer.readers.add(transport)
        try:
            await response.prepare(request)
            await self._send(response, offer, start)
        except OSError:  # gone, withdrawn, or too slow: a TimeoutError is one
            transport.abort()
        finally:
            offer.readers.discard(transport)
        return response

    async def _send(self, response: web.StreamResponse, offer: Offer, start: int) -> None:
        pace = Pace(self._limits)
        for piece in pieces(offer.parts, start, self._limits.chunk_bytes):
            pace.bytes += piece.nbytes
            await pace.wait(response.write(piece), self._limits.send_s)
            self.bytes_out += piece.nbytes
        await pace.wait(response.write_eof(), self._limits.send_s)


class Pace:
    """The patience with one side of a body: a grace, then a rate, and no long pause. Only waits for it count."""

    def __init__(self, limits: Limits) -> None:
        self.bytes = 0
        """Moved so far, or about to be; the caller counts them."""
        self._limits = limits
        self._waited_s = 0.0

    async def wait(self, work: Awaitable[T], longest_s: float) -> T:
        """TimeoutError when this wait, or all of them together, lasted too long."""
        clock = asyncio.get_running_loop().time
        began = clock()
        left_s = self._limits.body_grace_s + self.bytes / self._limits.body_rate - self._waited_s
        try:
            async with asyncio.timeout(min(left_s, longest_s)):
                return await work
        finally:
            self._waited_s += clock() - began


def range_start(request: web.Request) -> int:
    """The first byte that is asked for."""
    if (asked := request.headers.get("Range")) is None:
        return 0
    if (found := _RANGE.fullmatch(asked)) is None:
        raise Rejected(400, f"Range: {asked[:64]} is not understood: it looks like bytes=START-")
    return int(found[1])


def state_response(state: State) -> web.StreamResponse:
    headers = {
        SIZE_HEADER: str(state.size),
        DIGEST_HEADER: state.digest,
        "Content-Type": "application/octet-stream",
    }
    if state.offset:
        headers["Content-Range"] = f"bytes {state.offset}-{state.size - 1}/{state.size}"
    response = web.StreamResponse(status=206 if state.offset else 200, headers=headers)
    response.content_length = state.size - state.offset
    return response


def error_response(status: int, reason: object) -> web.Response:
    return web.json_response({"error": one_line(reason)}, status=status)


def _is_the_peers(record: logging.LogRecord) -> bool:
    """One that speaks no HTTP, or goes while it is answered, is no mistake of ours: it fills no log."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)


class _Closed(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _unbindable(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: choose another with --port, or 0 for any"
    return one_line(f"port {port} on {host} cannot be bound ({error.strerror or error}): choose another with --port")
