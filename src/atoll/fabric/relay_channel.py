"""A relay's channel to the syncer, and what a relay sends beside it (docs/adr/0032).

    GET /v1/relays                                 WebSocket, binary frames, opens with RelayHello
    PUT /v1/held/{learner}/{round}/{attempt}       JSON, in place of a contribution's body: what the relay holds of it
    PUT /v1/sums/{ask}                             a body: the sum that was asked for

Rules:
- a relay shows a join token of its own, with the role of a relay: whoever may only learn takes no relay's name and
  place. A token has `MOST_OF_TOKEN` relays at once. One whose token counts no more hears why and is
  sent away within a second;
- one live channel per name: a newer one takes the place of the older;
- the session that its hello names is a secret of relay and syncer. Requests and control channels of learners that come
  through the relay name it in `Atoll-Relay`; a session that is not connected is refused with 503, worth another try;
- what is held is told under the relay's own token, of a learner whose control channel came through that relay and is
  open in the session that `Atoll-Session` names.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol, cast

import msgspec
from aiohttp import WSMsgType, web

from atoll.fabric.authorizer import VISITOR, Authorizer, Rejected
from atoll.fabric.control_channel import SendQueue, ServerSocket
from atoll.fabric.intake import Intake
from atoll.fabric.join_tokens import HELD, RELAYS, SUMS
from atoll.fabric.wire import KIB, PROTOCOL_HEADER, RELAY_HEADER, SAME, SESSION_HEADER, FabricLimits, one_line
from atoll.protocol.errors import AtollError, PeerError
from atoll.protocol.limits import ALLOWED, is_name
from atoll.protocol.messages import OLDEST, PROTOCOL
from atoll.protocol.relay import FromRelay, HeldBody, RelayHello, RelayRefused, RunOver, ToRelay

MESSAGE_BYTES = 4096 * KIB
"""Largest message between a relay and the syncer: an ask that names many members, or many rows."""
MOST_RELAYS, MOST_OF_TOKEN = 256, 8
"""Relays at once: in all, and by one token."""
_NUMBER = "[0-9]{1,12}"

_encoder = msgspec.msgpack.Encoder()
_from_relay: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)
_to_relay: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
_held: msgspec.json.Decoder[HeldBody] = msgspec.json.Decoder(HeldBody)


def encode_relay(message: FromRelay | ToRelay) -> bytes:
    return _encoder.encode(message)


def decode_from_relay(data: bytes) -> FromRelay:
    try:
        return _from_relay.decode(data)
    except (msgspec.MsgspecError, AtollError, ValueError, RecursionError) as error:
        raise PeerError(one_line(f"a relay's message could not be read: {error}")) from None


def decode_to_relay(data: bytes) -> ToRelay:
    try:
        return _to_relay.decode(data)
    except (msgspec.MsgspecError, AtollError, ValueError, RecursionError) as error:
        raise PeerError(one_line(f"the syncer's message could not be read: {error}")) from None


class RelayChannel:
    """The syncer's end of one relay's channel."""

    def __init__(self, name: str, session: str, token: str, mark: str, outbox: SendQueue) -> None:
        self.name, self.session, self.token, self.mark = name, session, token, mark
        self._outbox = outbox

    def send(self, message: ToRelay) -> None:
        """Never waits. A relay that lets too much pile up loses the channel."""
        if not self._outbox.put(encode_relay(message)):
            self._outbox.close(discard=True)

    def close(self) -> None:
        """What was sent before still goes out."""
        self._outbox.close()


class RelayHandlers(Protocol):
    """The service behind it. A PeerError is told to the relay in one line."""

    def relay_opened(self, channel: RelayChannel) -> None: ...

    def relay_received(self, channel: RelayChannel, message: FromRelay) -> None: ...

    def relay_closed(self, channel: RelayChannel, reason: str) -> None: ...

    def contribution_held(self, session: str, learner: str, round: int, attempt: int, body: HeldBody) -> None: ...

    def expect_sum(self, session: str, ask: int) -> memoryview: ...

    def sum_arrived(self, session: str, ask: int, digest: str) -> None:
        """Whole; or, with an empty digest, broken off."""


class LearnerChannels(Protocol):
    """As far as a relay's requests are about them."""

    def came_through(self, learner: str, session: str, relay: str) -> bool:
        """Whether a learner's open channel has that session and comes through that relay."""
        ...


class RelayServer:
    def __init__(
        self,
        handlers: RelayHandlers,
        limits: FabricLimits,
        authorizer: Authorizer,
        intake: Intake,
        learners: LearnerChannels,
    ) -> None:
        self._handlers, self._limits, self._authorizer = handlers, limits, authorizer
        self._intake, self._learners = intake, learners
        self._channels: dict[str, RelayChannel] = {}
        """By session."""
        self.bytes_out = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(RELAYS, self._serve),
            web.put(f"{HELD}/{{learner}}/{{round:{_NUMBER}}}/{{attempt:{_NUMBER}}}", self._note_held),
            web.put(f"{SUMS}/{{ask:{_NUMBER}}}", self._receive_sum),
        ]

    def name_of(self, session: str) -> str:
        """Name of a connected relay; empty: it is not."""
        return self._channels[session].name if session in self._channels else ""

    def sweep(self) -> None:
        """Send away whose token counts no more."""
        for channel in list(self._channels.values()):
            if reason := self._authorizer.gone(channel.token, channel.mark):
                channel.send(RelayRefused(reason=reason))
                channel.close()

    def close(self) -> None:
        """The run is over."""
        for channel in list(self._channels.values()):
            channel.send(RunOver())
            channel.close()

    # ---- the channel --------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        limits, reason = self._limits, "the connection broke"
        socket = ServerSocket(
            compress=False, heartbeat=limits.ping_s, max_msg_size=MESSAGE_BYTES, timeout=limits.flush_s
        )
        socket.headers[PROTOCOL_HEADER] = f"{OLDEST}-{PROTOCOL}"
        await socket.prepare(request)
        outbox = SendQueue(limits.send_queue, 4 * MESSAGE_BYTES)
        channel: RelayChannel | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(socket, outbox))
            try:
                channel = await self._open(request, socket, outbox)
                while (message := await self._next(socket)) is not None:
                    self._handlers.relay_received(channel, message)
            except PeerError as error:
                reason = one_line(error)
                outbox.put(encode_relay(RelayRefused(reason=reason)))
            finally:
                outbox.close()
                if channel is not None and self._channels.get(channel.session) is channel:
                    del self._channels[channel.session]
                    self._handlers.relay_closed(channel, reason)
        return socket

    async def _open(self, request: web.Request, socket: ServerSocket, outbox: SendQueue) -> RelayChannel:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                hello = await self._next(socket)
        except TimeoutError:
            raise PeerError(f"no hello within {self._limits.hello_s:g} s") from None
        if not isinstance(hello, RelayHello):
            raise PeerError("a relay's channel opens with RelayHello")
        if not OLDEST <= hello.protocol <= PROTOCOL:
            raise PeerError(f"this syncer speaks protocol {PROTOCOL}, the relay speaks {hello.protocol}: {SAME}")
        if not is_name(hello.name) or not is_name(hello.session):
            raise PeerError(f"name = '{one_line(hello.name[:64])}' is no name of a relay: {ALLOWED}")
        visitor = request[VISITOR]
        channel = RelayChannel(hello.name, hello.session, visitor.token, visitor.mark, outbox)
        for other in [one for one in self._channels.values() if one.name == hello.name]:
            if other.token != channel.token:
                raise PeerError(f"a relay of the name {hello.name} is here by another token: choose another --name")
            del self._channels[other.session]
            self._handlers.relay_closed(other, "replaced by a newer connection of the same relay")
            other.close()
        if channel.token and sum(one.token == channel.token for one in self._channels.values()) >= MOST_OF_TOKEN:
            raise PeerError(
                f"the token {channel.token!r} has {MOST_OF_TOKEN} relays here, and no more are taken: "
                "atoll tokens add NAME --role relay makes another"
            )
        if len(self._channels) >= MOST_RELAYS:
            raise PeerError(f"{MOST_RELAYS} relays are here, and no more are taken")
        self._channels[channel.session] = channel
        self._handlers.relay_opened(channel)
        return channel

    async def _next(self, socket: ServerSocket) -> FromRelay | None:
        frame = await socket.receive()
        return decode_from_relay(cast(bytes, frame.data)) if frame.type is WSMsgType.BINARY else None

    async def _write(self, socket: ServerSocket, outbox: SendQueue) -> None:
        with suppress(OSError):  # a TimeoutError is one; the reader hears of it
            await outbox.drain(lambda data: self._send(socket, data), self._limits.send_s)
        with suppress(OSError):
            await socket.close()

    async def _send(self, socket: ServerSocket, data: bytes) -> None:
        self.bytes_out += len(data)
        await socket.send_bytes(data)

    # ---- beside it ----------------------------------------------------------------------------------------------

    def _relay_of(self, request: web.Request) -> RelayChannel:
        channel = self._channels.get(request.headers.get(RELAY_HEADER, ""))
        if channel is None or channel.token != request[VISITOR].token:
            raise Rejected(503, "this relay is not connected: try again later")
        return channel

    async def _note_held(self, request: web.Request) -> web.Response:
        relay, learner = self._relay_of(request), request.match_info["learner"]
        if not self._learners.came_through(learner, request.headers.get(SESSION_HEADER, ""), relay.session):
            raise Rejected(403, f"{learner} has no open control channel through this relay under this session")
        try:
            async with asyncio.timeout(self._limits.body_grace_s):
                body = _held.decode(await request.read())
        except TimeoutError:
            raise Rejected(408, "it came too slowly") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise Rejected(400, f"what is held could not be read: {error}") from None
        round, attempt = int(request.match_info["round"]), int(request.match_info["attempt"])
        self._handlers.contribution_held(relay.session, learner, round, attempt, body)
        return web.Response(status=204)

    async def _receive_sum(self, request: web.Request) -> web.Response:
        session, ask = self._relay_of(request).session, int(request.match_info["ask"])
        key = ("sum", session, ask)
        if self._intake.taken(key):
            raise Rejected(409, "the same sum is being received already")
        into, digest = self._handlers.expect_sum(session, ask), ""
        try:
            received = await self._intake.receive(request, f"relay {session}", key, into)
            digest = received.digest
        finally:
            self._handlers.sum_arrived(session, ask, digest)
        return web.Response(status=204, headers=received.headers)
