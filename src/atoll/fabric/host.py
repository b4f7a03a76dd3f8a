"""A port of this machine that answers, and the small server on one by which a courier gives its learner's state away.

    GET /v1/state/{ticket}   a body; headers Atoll-Size, Atoll-Digest; Range: bytes=START- for what is left of it

Rules:
- beyond this machine only with TLS and tokens (`authorizer`); connections as `listener` lets them in;
- asked by a name that is not its own, it answers nothing else (`authorizer`);
- every error is {"error": "one line"};
- requests are read one at a time (`requests`); an answer that is not taken in time costs its reader the connection, and
  large ones have `answer_bytes` together;
- a web page (an Origin header) is refused, unless the port says that it may read;
- only what is on offer is given, under a ticket that the syncer made and nobody can guess; nothing can be written.
  Whoever brings no such ticket hears 401, stays a stranger, and keeps no newcomer away;
- a state goes from the learner's own buffers to the socket, 512 KiB at a time; once withdrawn, they are not read again;
- a newcomer that reads too slowly is cut off. It asks for the rest, here or through the syncer (`relay`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_request import BaseRequest

from atoll.fabric.address import address_of_name, check_bind, host_port
from atoll.fabric.authorizer import VISITOR, Authorizer, OpenAuthorizer, Rejected, Visitor, check_host, own_names
from atoll.fabric.listener import Listener, Tls
from atoll.fabric.requests import HEAD_BYTES, RequestReader
from atoll.fabric.state import SIZE_HEADER, TICKET, resumed_at
from atoll.fabric.tasks import ConnectionErrors, VitalTasks
from atoll.fabric.transfer import pieces
from atoll.fabric.wire import DIGEST_HEADER, FabricLimits, one_line
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.limits import SharedBytes

NEWCOMERS = 8
"""Connections with a ticket to one courier at once: its learner's training comes first."""
STRANGERS = 16
"""The same without one. One more takes the place of the oldest."""

_logger = logging.getLogger("atoll.fabric.http")
_logger.addFilter(lambda record: not _is_the_peers(record))

_RANGE = re.compile(r"bytes=([0-9]{1,15})-")

T = TypeVar("T")


class Port:
    """One listening port: bounded connections, a deadline on headers, one-line errors."""

    def __init__(
        self,
        host: str,
        port: int,
        limits: FabricLimits,
        *,
        authorizer: Authorizer | None = None,
        tls: Tls | None = None,
        names: Collection[str] = (),
    ) -> None:
        """`names`: those by which it may be asked, beside its addresses and this machine's name."""
        check_bind(host, secured=authorizer is not None and tls is not None)
        if not 0 <= port <= 65535:
            raise ConfigError(f"port = {port} is not between 0 and 65535: choose another, or 0 for any")
        self.host = address_of_name(host)
        self.port = port
        """As asked for; once it is open, as it is."""
        self.or_any_port = False
        """Where that one is taken, another will do."""
        self._limits, self._tls = limits, tls
        self._authorizer: Authorizer = authorizer or OpenAuthorizer()
        self.vital = VitalTasks()
        """What it starts that must not end: its owner watches it."""
        self.mistakes = ConnectionErrors()
        """Of ours, each of which cost somebody a connection."""
        self._answers = SharedBytes(limits.answer_bytes)
        self._names = frozenset({self.host, *own_names(), *names})
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    @property
    def turned_away(self) -> int:
        """Connections that found no place."""
        return self._listener.turned_away if self._listener is not None else 0

    def _pages_may(self, request: web.Request) -> bool:
        """Whether a web page may ask this."""
        return False

    def _refused(self, request: web.Request, reason: str) -> None:
        """Somebody was not let in."""

    async def _open(self, routes: Iterable[web.RouteDef]) -> None:
        limits = self._limits
        app = web.Application(middlewares=[self._answer], client_max_size=limits.score_bytes)
        app.add_routes(
            web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": self._expected})
            for route in routes
        )
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=limits.flush_s)
        await self._runner.setup()
        assert self._runner.server is not None
        make = partial(
            RequestReader,
            self._runner.server,
            limits.header_s,
            loop=asyncio.get_running_loop(),
            access_log=None,
            logger=_logger,
            keepalive_timeout=limits.keepalive_s,
            lingering_time=limits.flush_s,
            auto_decompress=False,
        )
        self._listener = Listener(limits, self._tls, make, _force_close, self.vital, self.mistakes)
        try:
            try:
                self.port = await self._listener.open(self.host, self.port)
            except ConfigError:
                if not self.or_any_port:
                    raise
                self.port = await self._listener.open(self.host, 0)
        except ConfigError:
            await self._runner.cleanup()
            raise

    async def _close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _admit(self, request: web.Request) -> Visitor:
        """Rejected for whoever may not ask this, or asks by a name that is not ours."""
        visitor = self._authorizer.admit(request)
        reached = request.get_extra_info("sockname")
        check_host(request.headers.getall("Host", []), {*self._names, *([str(reached[0])] if reached else [])})
        return visitor

    async def _expected(self, request: web.Request) -> None:
        """Nobody's body is asked for before it is known who they are."""
        try:
            self._admit(request)
        except Rejected:
            return  # they are told by `_answer`
        if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert self._listener is not None
        try:
            request[VISITOR] = self._admit(request)
        except Rejected as error:
            self._refused(request, str(error))
            return _turned_away(error, password=self._authorizer.password)
        visitor = request[VISITOR]
        if not self._listener.admit(request.protocol, visitor.token, viewer=visitor.role == "viewer"):
            return _turned_away(Rejected(429, "this token has too many connections open: try again later"))
        try:
            if "Origin" in request.headers and not self._pages_may(request):
                raise Rejected(403, "web pages may only read")
            if not all(value.isascii() for value in request.headers.values()):
                raise Rejected(400, "a header is not ASCII")  # aiohttp would stumble over it
            if request.headers.get("Transfer-Encoding") is not None:
                raise Rejected(400, "the body has no length: Content-Length has to name it")  # nothing of it is read
            if request.method == "CONNECT":
                raise Rejected(400, "no tunnels are made here")
            if request.method in ("GET", "HEAD") and request.headers.get("Content-Length", "0") != "0":
                return _turned_away(Rejected(400, f"a {request.method} has no body"))  # nobody would read it
            if "Sec-WebSocket-Protocol" in request.headers:
                raise Rejected(400, "no sub-protocol is spoken here")  # aiohttp would log all that are offered
            return await self._send_answer(request, await handler(request))
        except Rejected as error:
            return error_response(error.status, error)
        except PeerError as error:
            return error_response(409, error)
        except web.HTTPException as error:
            return error_response(error.status, error.reason)
        except SlowReader:
            _abort(request)
            return error_response(408, "it was taken too slowly")  # to nobody
        except ConnectionError as error:
            return error_response(400, error)  # to nobody: the peer went while it was being answered
        except Exception as error:
            self.mistakes.add(error)
            if request.writer.output_size:
                _abort(request)  # an answer had begun
            return _turned_away(Rejected(500, "the syncer made a mistake: its log has more about it"))

    async def _send_answer(self, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        """Whole, unless the handler has sent it."""
        if answer.prepared:
            return answer
        body = answer.body if isinstance(answer, web.Response) else None
        if isinstance(body, bytes) and len(body) > HEAD_BYTES and request.method != "HEAD":
            return await self._send_large(request, answer, body)
        async with within(self._limits.send_s + _file_bytes(answer) / self._limits.body_rate):
            await answer.prepare(request)
            await answer.write_eof()
        return answer

    async def _send_large(self, request: web.Request, answer: web.StreamResponse, body: bytes) -> web.StreamResponse:
        token = request[VISITOR].token
        if not self._answers.take(token, len(body)):
            raise Rejected(429, "too many answers are being sent: try again later")
        try:
            sent = web.StreamResponse(status=answer.status, headers=answer.headers)
            await send_pieces(request, sent, [memoryview(body)], self._limits)
        finally:
            self._answers.give_back(token, len(body))
        return sent


class SlowReader(Exception):
    """The peer does not take what it asked for."""


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """The peer has so long to take something; SlowReader."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SlowReader from None


def piece_bytes(request: web.Request, limits: FabricLimits) -> int:
    return limits.tls_chunk_bytes if request.secure else limits.chunk_bytes


async def send_pieces(
    request: web.Request,
    response: web.StreamResponse,
    parts: Sequence[memoryview],
    limits: FabricLimits,
    count: Callable[[int], None] = lambda size: None,
) -> None:
    """`count` is told the size of each piece as it is written; SlowReader."""
    response.content_length = sum(part.nbytes for part in parts)
    await response.prepare(request)
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(limits.send_s) as deadline:  # of each piece: a new one for each would cost more
            for piece in pieces(parts, 0, piece_bytes(request, limits)):
                count(piece.nbytes)
                await response.write(piece)
                await asyncio.sleep(0)  # a reader that keeps up never makes a write wait: the loop has other work too
                deadline.reschedule(clock() + limits.send_s)
            await response.write_eof()
    except TimeoutError:
        raise SlowReader from None


class FileAnswer(web.FileResponse):
    """Sent in pieces that are waited for. (asyncio's own way puts half a megabyte into the buffers of TLS.)"""

    def __init__(self, path: Path, **how: Any) -> None:
        super().__init__(path, chunk_size=FabricLimits().tls_chunk_bytes, **how)
        self.size = path.stat().st_size

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        return None if self.prepared else await super().prepare(request)  # aiohttp asks again once it is sent

    async def _sendfile(self, request: BaseRequest, fobj: IO[Any], offset: int, count: int) -> AbstractStreamWriter:
        writer = await web.StreamResponse.prepare(self, request)
        assert writer is not None
        return await self._sendfile_fallback(writer, fobj, offset, count)


def _file_bytes(answer: web.StreamResponse) -> int:
    return answer.size if isinstance(answer, FileAnswer) else 0


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


@dataclass(frozen=True, slots=True)
class StateHead:
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


class TicketAuthorizer(OpenAuthorizer):
    """Whoever brings a ticket may ask."""

    def __init__(self, offers: Collection[str]) -> None:
        self._offers = offers

    def admit(self, request: web.Request) -> Visitor:
        if request.match_info.get("ticket") not in self._offers:
            raise Rejected(401, "no state is on offer under this ticket: ask the syncer for another")
        return super().admit(request)


class StateHost(Port):
    """What a courier has on offer for newcomers that can reach it."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, limits: FabricLimits | None = None) -> None:
        self.bytes_out = 0
        self._offers: dict[str, Offer] = {}
        places = {"connections": 2 * (NEWCOMERS + STRANGERS), "strangers": STRANGERS, "token_connections": NEWCOMERS}
        limits = msgspec.structs.replace(limits or FabricLimits(), **places)
        super().__init__(host, port, limits, authorizer=TicketAuthorizer(self._offers))

    @property
    def url(self) -> str:
        return f"http://{host_port(self.host, self.port)}"

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
        offer, transport = self._offers[request.match_info["ticket"]], request.transport
        if transport is None:
            raise ConnectionResetError("the newcomer is gone")
        start = resumed_at(range_start(request), offer.size)
        response = state_response(StateHead(start, offer.size, offer.digest))
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
        pace = BodyPace(self._limits)
        for piece in pieces(offer.parts, start, self._limits.chunk_bytes):
            pace.bytes += piece.nbytes
            await pace.wait(response.write(piece), self._limits.send_s)
            self.bytes_out += piece.nbytes
            await asyncio.sleep(0)  # a reader that keeps up never makes a write wait: the loop has other work too
        await pace.wait(response.write_eof(), self._limits.send_s)


class BodyPace:
    """The patience with one side of a body: a grace, then a rate, and no long pause. Only waits for it count."""

    def __init__(self, limits: FabricLimits) -> None:
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


def state_response(state: StateHead) -> web.StreamResponse:
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


def _turned_away(error: Rejected, *, password: bool = False) -> web.Response:
    """The connection closes with the answer, and nothing more of it is read. A stranger stays one."""
    response = error_response(error.status, error)
    if error.status == 401 and password:
        response.headers["WWW-Authenticate"] = 'Basic realm="atoll", charset="UTF-8"'
    response.force_close()
    return response


def _is_the_peers(record: logging.LogRecord) -> bool:
    """One that speaks no HTTP, or goes while it is answered, is no mistake of ours: it fills no log."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)


def _force_close(connection: asyncio.Protocol) -> None:
    """At once: one that was never let in has nothing to wait for."""
    assert isinstance(connection, web.RequestHandler)
    transport = connection.transport
    connection.force_close()
    if transport is not None:
        transport.abort()
