"""A peer's state on its way to a newcomer through the syncer, which passes it on and keeps none of it.

    GET /v1/relay/{ticket}   the newcomer: Atoll-Session, Atoll-Learner; Range: bytes=START- to go on after a break
    PUT /v1/relay/{ticket}   the peer: the same, and Atoll-Offset, Atoll-Size, Atoll-Digest; as long as what is left

Rules:
- the GET comes first and waits for the PUT (60 s); a PUT that nobody waits for is refused (409);
- between them lie at most 4 MiB: a newcomer that reads slowly slows its peer down, and costs the syncer nothing;
- one stream per ticket: a newer GET replaces the older one, and its peer is asked again;
- either side must keep the rate of a body while it is waited for; the other side's slowness is not its own;
- when the newcomer goes, the peer is told with its next bytes and is free; when the peer goes, what has come is passed
  on and the GET's connection is closed before its body is whole: the next GET asks for the rest;
- the newcomer judges the bytes: size and digest are passed on as the peer named them;
- a peer whose state is shorter than what the newcomer has got of another's sends it whole: 200 instead of 206.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable

import msgspec
from aiohttp import web

from atoll.fabric.authorizer import Rejected
from atoll.fabric.calls import next_chunk
from atoll.fabric.handlers import Handlers
from atoll.fabric.host import BodyPace, StateHead, range_start, state_response
from atoll.fabric.state import OFFSET_HEADER, PEER_S, SIZE_HEADER, resumed_at
from atoll.fabric.wire import DIGEST_HEADER, MIB, FabricLimits
from atoll.protocol.errors import ConfigError, Unreachable

_NUMBER = re.compile(r"[0-9]{1,15}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ForwardingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What recoveries may cost a syncer, beside what bodies may (`wire.FabricLimits`)."""

    streams: int = 16
    """At once, of all newcomers together."""
    window_bytes: int = 4 * MIB
    """Bytes of one stream that have come and not gone on yet."""
    peer_s: float = PEER_S
    """How long a newcomer waits for its peer to begin."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0")


class ForwardedStream:
    """A newcomer that waits and, once it comes, the peer that sends; the chunks between them, within a limit."""

    def __init__(self, start: int, limit_bytes: int, listening: Callable[[], bool]) -> None:
        self.start = start
        self.listening = listening
        """Whether the newcomer is still there."""
        self.state: StateHead | None = None
        """Set once the peer sends."""
        self.most_bytes = 0
        """The most that ever lay here."""
        self.whole = False
        self._limit_bytes = limit_bytes
        self._chunks: deque[bytes] = deque()
        self._bytes = 0
        self._closed = self._delivered = False
        self._end: Rejected | None = None
        self._news = asyncio.Event()

    async def opened(self) -> StateHead:
        await self._until(lambda: self.state is not None)
        assert self.state is not None
        return self.state

    async def take_chunk(self) -> bytes:
        """The next chunk; empty when no more will come, and then `whole` says whether it was all."""
        await self._until(lambda: bool(self._chunks) or self._closed)
        if not self._chunks:
            return b""
        chunk = self._chunks.popleft()
        self._bytes -= len(chunk)
        self._news.set()
        return chunk

    def delivered(self) -> None:
        self._delivered = True
        self._news.set()

    def open(self, state: StateHead) -> None:
        self.state = state
        self._news.set()

    async def give(self, chunk: bytes) -> None:
        """Waits for room; Rejected when the newcomer wants no more."""
        await self._until(lambda: not self._bytes or self._bytes + len(chunk) <= self._limit_bytes)
        self._chunks.append(chunk)
        self._bytes += len(chunk)
        self.most_bytes = max(self.most_bytes, self._bytes)
        self._news.set()

    def close(self, *, whole: bool) -> None:
        """The peer sends no more. What lies here still goes on."""
        self.whole = self.whole or whole
        self._closed = True
        self._news.set()

    async def taken(self) -> None:
        """Until the newcomer's connection has taken the last byte."""
        await self._until(lambda: self._delivered)

    def end(self, status: int, reason: str) -> None:
        """Nobody waits any longer. What was delivered whole stays so."""
        if self._end is None and not self._delivered:
            self._end = Rejected(status, reason)
            self._news.set()

    async def _until(self, true: Callable[[], bool]) -> None:
        while self._end is None and not true():
            self._news.clear()
            await self._news.wait()
        if self._end is not None:
            raise Rejected(self._end.status, str(self._end))


class StateForwarder:
    """Every stream of a syncer, by ticket. Who may ask and who may send, the service decides."""

    def __init__(self, handlers: Handlers, limits: FabricLimits, forwarding: ForwardingLimits) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.most_bytes = 0
        """The most that ever lay in one stream."""
        self._handlers, self._limits, self._forwarding = handlers, limits, forwarding
        self._streams: dict[str, ForwardedStream] = {}

    def close(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.end(503, reason)

    # ---- the newcomer ---------------------------------------------------------------------------------------------

    async def fetch(self, request: web.Request, learner: str) -> web.StreamResponse:
        ticket = request.match_info["ticket"]
        stream = self._expect(ticket, learner, request)
        try:
            state = await self._peer(stream)
            return await self._pass_on(request, stream, state)
        finally:
            stream.end(409, "the newcomer is gone")
            if self._streams.get(ticket) is stream:
                del self._streams[ticket]

    def _expect(self, ticket: str, learner: str, request: web.Request) -> ForwardedStream:
        start, limits = range_start(request), self._forwarding
        for stream in self._streams.values():
            if not stream.listening():
                stream.end(409, "the newcomer is gone")
        others = sum(stream.listening() for key, stream in self._streams.items() if key != ticket)
        if others >= limits.streams:
            raise Rejected(429, f"{others} states are being passed on already: try again later")
        self._handlers.forwarding_wanted(ticket, learner, start)
        if (older := self._streams.get(ticket)) is not None:
            older.end(409, "replaced by a newer request for the same state")
        self._streams[ticket] = ForwardedStream(start, limits.window_bytes, lambda: _connected(request))
        return self._streams[ticket]

    async def _peer(self, stream: ForwardedStream) -> StateHead:
        try:
            async with asyncio.timeout(self._forwarding.peer_s):
                return await stream.opened()
        except TimeoutError:
            raise Rejected(504, f"no peer sent its state within {self._forwarding.peer_s:g} s") from None

    async def _pass_on(self, request: web.Request, stream: ForwardedStream, state: StateHead) -> web.StreamResponse:
        response, pace = state_response(state), BodyPace(self._limits)
        try:
            await response.prepare(request)
            while chunk := await stream.take_chunk():
                pace.bytes += len(chunk)
                await pace.wait(response.write(chunk), self._limits.send_s)
                self.bytes_out += len(chunk)
            if stream.whole:
                await pace.wait(response.write_eof(), self._limits.send_s)
                stream.delivered()
                return response
        except TimeoutError:
            stream.end(409, f"the newcomer reads too slowly: {pace.bytes} bytes so far")
        except (OSError, Rejected):
            pass  # gone, or not wanted any longer: the peer is told in `fetch`
        _cut_off(request, self._limits.flush_s)
        return response

    # ---- the peer -------------------------------------------------------------------------------------------------

    async def send(self, request: web.Request, learner: str) -> web.Response:
        ticket, state = request.match_info["ticket"], _described(request)
        self._handlers.forwarding_allowed(ticket, learner)
        stream = self._waiting(ticket, state)
        stream.open(state)
        try:
            await self._receive(request, stream, state.size - state.offset)
            stream.close(whole=True)
            await stream.taken()
        finally:
            stream.close(whole=False)
            self.most_bytes = max(self.most_bytes, stream.most_bytes)
        return web.Response(status=204)

    def _waiting(self, ticket: str, state: StateHead) -> ForwardedStream:
        stream = self._streams.get(ticket)
        if stream is None or not stream.listening():
            raise Rejected(409, "nobody waits for this state now")
        if stream.state is not None:
            raise Rejected(409, "this state is being sent already")
        if state.offset != resumed_at(stream.start, state.size):
            raise Rejected(409, f"byte {stream.start} is waited for, this begins with byte {state.offset}")
        return stream

    async def _receive(self, request: web.Request, stream: ForwardedStream, length: int) -> None:
        pace = BodyPace(self._limits)
        try:
            while pace.bytes < length:
                chunk = await pace.wait(next_chunk(request.content), self._limits.body_idle_s)
                if not chunk:
                    raise Rejected(400, f"the state ended after {pace.bytes} of {length} bytes")
                pace.bytes += len(chunk)
                self.bytes_in += len(chunk)
                await stream.give(chunk)
        except TimeoutError:
            raise Rejected(408, f"the state came too slowly: {pace.bytes} of {length} bytes so far") from None
        except Unreachable as error:
            raise Rejected(400, f"the connection broke after {pace.bytes} of {length} bytes: {error}") from None


def _described(request: web.Request) -> StateHead:
    """What the headers of a PUT say, if they agree with each other."""
    offset, size = request.headers.get(OFFSET_HEADER, ""), request.headers.get(SIZE_HEADER, "")
    digest = request.headers.get(DIGEST_HEADER, "")
    if not (_NUMBER.fullmatch(offset) and _NUMBER.fullmatch(size) and _DIGEST.fullmatch(digest)):
        raise Rejected(400, f"a state comes with {OFFSET_HEADER}, {SIZE_HEADER} and {DIGEST_HEADER}")
    state = StateHead(int(offset), int(size), digest)
    if state.offset >= state.size or request.content_length != state.size - state.offset:
        raise Rejected(
            400, f"the body has {request.content_length} bytes, {state.size - state.offset} are left of {state.size}"
        )
    return state


def _connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _cut_off(request: web.Request, flush_s: float) -> None:
    """Close a body before its end; what was written still goes out, for a while."""
    if request.transport is not None:
        request.transport.close()
        asyncio.get_running_loop().call_later(flush_s, request.transport.abort)
