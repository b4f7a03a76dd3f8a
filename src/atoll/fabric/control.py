"""Control channels: one WebSocket per learner, binary frames, opened by a Hello.

Rules:
- one live channel per learner: a newer one that the service accepts replaces it, and the service hears no more of the
  replaced one; a newer one that the service refuses changes nothing;
- another process has the name of a live channel only if it proves to be the successor, or if whoever is there answers
  no ping; otherwise it is refused, and nobody else notices; so is a process that was succeeded (`protocol.succession`);
- a bad frame costs its sender the channel: Refused with one line, then closed; one over 4 MiB is closed unread (1009);
- a name belongs to the token that it first came by, also for the next syncer (see `join_tokens`); whose token counts no
  more is sent away within a second;
- what is not above the last sequence number of its (learner, session) was said before: refused, and the
  service does not hear of it (see `control_channel`);
- the hello must come within 5 s, whatever comes before it; a silent peer is pinged and lost after 9 s; a slow one after
  1024 waiting messages; one that sends more than 1000 frames a second, pings too, or 2 MiB, after a few seconds;
- to read a hello costs as much as it is long: of one token at one address so many bytes of them are read, and so many a
  second; then it is asked to come again later, before anything of it is read;
- what has come of a channel that is not open yet, a hello or anything else, takes memory: of one token so many bytes,
  and twice as many of all. One that brings more is cut off, and dials again. The first 32 KiB are the connection's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

from aiohttp import WSMessage, WSMsgType, web

from atoll.fabric.authorizer import VISITOR, Authorizer, OpenAuthorizer, Rejected, Visitor
from atoll.fabric.control_channel import ControlChannel, PeerPing, SendQueue, SequenceNumbers, ServerSocket, unnumbered
from atoll.fabric.handlers import Handlers
from atoll.fabric.join_tokens import NameOwners
from atoll.fabric.listener import WatchedProtocol
from atoll.fabric.wire import (
    KIB,
    PROTOCOL_HEADER,
    RELAY_HEADER,
    FabricLimits,
    check_hello,
    decode_from_learner,
    encode,
    one_line,
)
from atoll.protocol.errors import PeerError
from atoll.protocol.limits import Budget, Budgets, SharedBytes
from atoll.protocol.messages import OLDEST, PROTOCOL, Hello, Refused
from atoll.protocol.relay import RELAY_BACK
from atoll.protocol.succession import SUCCEEDED, Holder, Predecessors, judge_claim, tell_taken

BURST_S = 5.0
"""Seconds' worth of messages that may come at once: what waited behind a link that was down."""
OWN_BYTES = 32 * KIB
"""Of a channel that is not open yet are part of what a connection may take."""
LATER = "more was said in hellos than is read at once: come again in a few seconds"


class ControlServer:
    def __init__(
        self,
        handlers: Handlers,
        limits: FabricLimits,
        authorizer: Authorizer | None = None,
        owners: NameOwners | None = None,
    ) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.bad_frames = 0
        self._handlers = handlers
        self._limits = limits
        self._authorizer: Authorizer = authorizer or OpenAuthorizer()
        self._channels: dict[str, ControlChannel] = {}
        self._owners = owners or NameOwners()
        self._sequences = SequenceNumbers(limits.sessions)
        self._predecessors = Predecessors(limits.sessions)
        self._hellos = Budgets(limits.hello_bytes, limits.hello_rate)
        """By token and address."""
        self._unopened = SharedBytes(2 * limits.hello_bytes)
        """Of channels that are not open yet."""
        self.relays: ConnectedRelays | None = None

    def came_through(self, learner: str, session: str, relay: str) -> bool:
        channel = self.channel(learner)
        return channel is not None and (channel.session, channel.relay) == (session, relay)

    def channel(self, learner: str) -> ControlChannel | None:
        """The live one."""
        channel = self._channels.get(learner)
        return None if channel is None or channel.closing else channel

    def close(self, reason: str) -> None:
        for channel in list(self._channels.values()):
            channel.close(reason)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        limits = self._limits
        if not self._hellos.any_left(_whose(request), asyncio.get_running_loop().time()):
            raise Rejected(429, LATER)
        relay = request.headers.get(RELAY_HEADER, "")
        if relay and (self.relays is None or not self.relays.name_of(relay)):
            raise Rejected(503, "the relay that passes this on is not connected: try again later")
        socket = ServerSocket(
            compress=False,
            autoping=False,
            heartbeat=limits.ping_s,
            max_msg_size=limits.control_bytes,
            timeout=limits.flush_s,
        )
        socket.headers[PROTOCOL_HEADER] = f"{OLDEST}-{PROTOCOL}"
        try:
            await socket.prepare(request)
        except ValueError:  # of a key that is no text
            raise Rejected(400, "this is no handshake of a WebSocket") from None
        unopened = UnopenedChannel(self._unopened, request)
        try:
            await self._talk(request, socket, unopened)
        finally:
            unopened.end()
        return socket

    async def _talk(self, request: web.Request, socket: ServerSocket, unopened: UnopenedChannel) -> None:
        limits, relay = self._limits, request.headers.get(RELAY_HEADER, "")
        flood = MessageRate(limits, asyncio.get_running_loop().time)
        try:
            hello = await self._hello(request, socket, flood)
        except _Gone:
            return
        except PeerError as error:
            await self._refuse(socket, error, final=not isinstance(error, _Later))
            return
        outbox = SendQueue(limits.send_queue, limits.queue_bytes)
        channel = ControlChannel(
            hello.learner,
            hello.session,
            outbox=outbox,
            flush_s=limits.flush_s,
            abort=lambda: _abort(request),
            token=request[VISITOR].token,
            mark=request[VISITOR].mark,
            holder=Holder.of(hello, request.remote or ""),
            liveness=PeerPing(socket.ping),
            relay=relay,
            relay_name=self.relays.name_of(relay) if relay and self.relays is not None else "",
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(socket, channel, outbox))
            try:
                opened = await self._open(channel, hello, request[VISITOR])
                del hello  # it may be large
                if opened:
                    unopened.end()
                    await self._read(socket, channel, flood)
                else:
                    await self._until_closed(socket)
            except _Gone as gone:
                channel.reason = channel.reason or _explain_end(channel, gone)
            finally:
                outbox.close(discard=True)
                self._shut(channel)

    async def _hello(self, request: web.Request, socket: ServerSocket, flood: MessageRate) -> Hello:
        first = await self._first(socket, flood)
        whose, now = _whose(request), asyncio.get_running_loop().time()
        if not self._hellos.any_left(whose, now):  # others of it came meanwhile
            raise _Later(LATER)
        self._hellos.spend(whose, now, len(first))
        return check_hello(decode_from_learner(first))

    async def _open(self, channel: ControlChannel, hello: Hello, visitor: Visitor) -> bool:
        try:
            self._check_owner(channel, visitor)
            await self._check_free(channel)
        except PeerError as error:
            self._handlers.turned_away(channel.learner, one_line(error))
            self._reject(channel, error, final=True)
            return False
        try:
            self._sequences.check(channel, hello)
            self._handlers.opened(channel, unnumbered(hello))
        except PeerError as error:
            self._reject(channel, error)
        if channel.closing:
            return False
        self._owners.assign_name(channel.learner, channel.token)
        self._sequences.note(channel, hello)
        self._predecessors.note_hello(channel.learner, channel.holder)
        older = self._channels.get(channel.learner)
        self._channels[channel.learner] = channel
        if older is not None:
            older.close("replaced by a newer connection of the same learner")
        return True

    def _check_owner(self, channel: ControlChannel, visitor: Visitor) -> None:
        learner, token = channel.learner, channel.token
        there = {name for name, other in self._channels.items() if other.token == token and not other.closing}
        self._authorizer.may_join(visitor, learner, there, self._owners)
        if learner not in self._channels and len(self._channels) >= self._limits.learners:
            raise PeerError(f"{len(self._channels)} learners are there, and no more are taken: try again later")

    async def _check_free(self, channel: ControlChannel) -> None:
        """PeerError while another process has the name, and lives, or where this one was succeeded. Meanwhile yet
        another may have taken the name."""
        if self._predecessors.has_process(channel.learner, channel.holder):
            raise PeerError(SUCCEEDED)
        while (there := self.channel(channel.learner)) is not None:
            if judge_claim(there.holder, channel.holder) != "stranger" or there.liveness is None:
                return
            if await there.liveness.answers(self._limits.answer_s) and not there.closing:
                raise PeerError(tell_taken(channel.learner, there.holder.host, there.holder.pid))
            if self.channel(channel.learner) is there:
                return

    def sweep(self) -> None:
        """Send away whose token counts no more."""
        for channel in list(self._channels.values()):
            if not channel.closing and (reason := self._authorizer.gone(channel.token, channel.mark)):
                self._reject(channel, PeerError(reason), final=True)

    async def _read(self, socket: web.WebSocketResponse, channel: ControlChannel, flood: MessageRate) -> None:
        while True:
            try:
                message = decode_from_learner(await self._frame(socket, flood, channel.liveness))
                if isinstance(message, Hello):
                    raise PeerError("a second hello on the same channel")
                if not channel.closing:
                    self._sequences.check(channel, message)
                    self._sequences.note(channel, message)
                    self._handlers.received(channel, unnumbered(message))
            except PeerError as error:
                self._reject(channel, error)

    def _reject(self, channel: ControlChannel, error: PeerError, *, final: bool = False) -> None:
        self.bad_frames += 1
        channel.send(Refused(reason=one_line(error), final=final))
        channel.close(f"refused: {error}")

    def _shut(self, channel: ControlChannel) -> None:
        if self._channels.get(channel.learner) is channel:
            del self._channels[channel.learner]
            self._handlers.closed(channel, channel.reason or "the connection broke")

    async def _write(self, socket: web.WebSocketResponse, channel: ControlChannel, outbox: SendQueue) -> None:
        try:
            await outbox.drain(lambda data: self._send(socket, data), self._limits.send_s)
            await socket.close(message=channel.reason.encode("ascii", "replace")[:120])
        except TimeoutError:
            channel.drop(f"the learner took no message for {self._limits.send_s:g} s")
        except OSError as error:
            channel.drop(f"the connection broke: {error}")

    async def _send(self, socket: web.WebSocketResponse, data: bytes) -> None:
        self.bytes_out += len(data)
        await socket.send_bytes(data)

    async def _refuse(self, socket: web.WebSocketResponse, error: PeerError, *, final: bool = True) -> None:
        self.bad_frames += 1
        try:
            async with asyncio.timeout(self._limits.flush_s):
                await self._send(socket, encode(Refused(reason=one_line(error), final=final)))
                await socket.close()
        except (OSError, TimeoutError):
            pass  # it is gone already

    async def _first(self, socket: web.WebSocketResponse, flood: MessageRate) -> bytes:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                return await self._frame(socket, flood)
        except TimeoutError:
            raise PeerError(f"no hello within {self._limits.hello_s:g} s") from None

    async def _frame(
        self, socket: web.WebSocketResponse, flood: MessageRate | None = None, liveness: PeerPing | None = None
    ) -> bytes:
        """The next frame that says something; `_Gone` when there will be none. Pings notice a dead peer.

        Its own pings are answered here, and count: nobody holds a channel open, or us busy, with them.
        """
        while (frame := await _receive(socket, liveness)).type in (WSMsgType.PING, WSMsgType.PONG):
            if flood is not None:
                flood.count_message()
            if frame.type is WSMsgType.PING:
                await self._pong(socket, cast(bytes, frame.data))
        if frame.type is WSMsgType.BINARY:
            data = cast(bytes, frame.data)
            self.bytes_in += len(data)
            if flood is not None:
                flood.count_message(len(data))
            return data
        if frame.type is WSMsgType.TEXT:
            raise PeerError("a text frame: control messages are binary")
        if frame.type is WSMsgType.ERROR:
            self.bad_frames += socket.exception() is not None
            raise _Gone(one_line(f"the channel failed: {socket.exception() or frame.data}"))
        if frame.type is not WSMsgType.CLOSE:  # the link or the learner died, or this end gave it up
            raise _Gone("the connection broke")
        raise _Gone(f"the learner closed the channel ({one_line(frame.extra or 'no reason given')})", frame.extra or "")

    async def _pong(self, socket: web.WebSocketResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.send_s):
                await socket.pong(data)
        except OSError as error:  # a TimeoutError is one
            raise _Gone(one_line(f"the learner takes no answer to its ping: {error}")) from None

    async def _until_closed(self, socket: web.WebSocketResponse) -> None:
        while True:
            with suppress(PeerError):  # it was refused already, and nothing more of it counts
                await self._frame(socket)


class ConnectedRelays(Protocol):
    def name_of(self, session: str) -> str:
        """Name of a connected relay; empty: it is not."""
        ...


class MessageRate:
    """A learner may send so many messages a second, and bytes, and has some seconds' worth of them to begin with."""

    def __init__(self, limits: FabricLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._messages = Budget(BURST_S * limits.messages_rate, limits.messages_rate, clock())
        self._bytes = Budget(BURST_S * limits.control_rate, limits.control_rate, clock())

    def count_message(self, size: int = 0) -> None:
        now = self._clock()
        if not self._messages.take(now, 1):
            raise PeerError(f"more than {self._limits.messages_rate:g} messages a second: this is a flood")
        if not self._bytes.take(now, size):
            raise PeerError(f"more than {self._limits.control_rate} bytes of messages a second: this is a flood")


class UnopenedChannel:
    def __init__(self, all: SharedBytes, request: web.Request) -> None:
        self._all, self._request, self._token = all, request, request[VISITOR].token
        self._came = self._taken = 0
        protocol = request.transport.get_protocol() if request.transport is not None else None
        self._reads = protocol if isinstance(protocol, WatchedProtocol) else None
        if self._reads is not None:
            self._reads.keeps = self._take
            self._take(self._reads.last_read)  # some of the hello may have come with the request

    def _take(self, size: int) -> bool:
        """Whether there is room for so many bytes more. If not, it is cut off."""
        self._came += size
        more = max(0, self._came - OWN_BYTES - self._taken)
        if not self._all.take(self._token, more):
            _abort(self._request)
            return False
        self._taken += more
        return True

    def end(self) -> None:
        """It is open, or closed. A second time changes nothing."""
        if self._reads is not None:
            self._reads.keeps = None
            self._reads = None
            self._all.give_back(self._token, self._taken)


class _Gone(Exception):
    """No more frames will come."""

    def __init__(self, text: str, said: str = "") -> None:
        """`said`: the words with which the peer closed the channel; empty: it said nothing, or died."""
        super().__init__(text)
        self.said = one_line(said)


def _explain_end(channel: ControlChannel, gone: _Gone) -> str:
    """Return why a channel ended. A learner behind a relay that dies has not closed it."""
    if not channel.relay:
        return RELAY_BACK if gone.said == RELAY_BACK else str(gone)
    return (
        f"relay {channel.relay_name}: {gone.said}" if gone.said else f"its way through relay {channel.relay_name} broke"
    )


class _Later(PeerError):
    """It may come again."""


async def _receive(socket: web.WebSocketResponse, liveness: PeerPing | None) -> WSMessage:
    frame = await socket.receive()
    if liveness is not None:
        liveness.note()
    return frame


def _whose(request: web.Request) -> tuple[str, str | None]:
    return (request[VISITOR].token, request.remote)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
