"""One learner's control channel: its queue of messages, its ping, its sequence numbers, its WebSocket.

Rules:
- nobody waits to send: messages are queued in order, and a peer that lets too many pile up loses the channel;
- a peer answers a ping with whatever it sends next; several that ask at the same time share one ping;
- a reply may lie unread in the socket because this end's event loop was busy: then nobody is declared dead. When a loop
  comes back it reads sockets before it looks at timers, so whatever was read in the same turn counts;
- messages of a (learner, session) are numbered, over all its connections, and numbers only go up: a message that is
  sent again, by anybody, is refused, and so is a hello, so nobody opens a channel with another's; so is a message
  without a number;
- the sequence numbers of a bounded number of sessions are remembered, those heard last. What is forgotten, or was sent
  to another syncer, can be replayed: numbers are a second line behind TLS, not a replacement.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from atoll.fabric.wire import encode, one_line
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Announce, FromLearner, FromSyncer
from atoll.protocol.succession import Holder


class ControlChannel:
    """One learner's control channel, after its hello. Belongs to the event loop."""

    def __init__(
        self,
        learner: str,
        session: str,
        *,
        outbox: SendQueue,
        abort: Callable[[], None],
        flush_s: float,
        token: str = "",
        mark: str = "",
        holder: Holder | None = None,
        liveness: PeerPing | None = None,
        relay: str = "",
        relay_name: str = "",
    ) -> None:
        self.learner = learner
        self.session = session
        self.token, self.mark = token, mark
        """The name and the mark of what it showed at the door; no secret."""
        self.holder = holder or Holder(session)
        """Who has the learner's name by it."""
        self.liveness = liveness
        """None: nobody is asked."""
        self.relay, self.relay_name = relay, relay_name
        """The session and the name of the relay that it comes through; empty: directly."""
        self.reason = ""
        """Why it is closed or closing; empty while it is open."""
        self._outbox = outbox
        self._abort = abort
        self._flush_s = flush_s

    @property
    def closing(self) -> bool:
        return self._outbox.closed

    def send(self, message: FromSyncer) -> None:
        """Never waits. A peer that lets too much pile up loses the channel."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is encoded already, since several learners receive it."""
        if not self._outbox.closed and not self._outbox.put(data):
            self.drop("the learner reads too slowly: its queue of messages is full")

    def close(self, reason: str) -> None:
        """What was sent before still goes out (within 2 s), then the channel closes."""
        if not self._outbox.closed:
            self.reason = self.reason or one_line(reason)
            self._outbox.close()
            asyncio.get_running_loop().call_later(self._flush_s, self._abort)

    def drop(self, reason: str) -> None:
        """Close at once; what is queued is lost."""
        self.reason = self.reason or one_line(reason)
        self._outbox.close(discard=True)
        self._abort()


class SharedAnnouncement:
    """Encodes the announcement of a round to its non-members, who all receive the same message, once."""

    def __init__(self) -> None:
        self._last: tuple[Announce, bytes] | None = None

    def encode(self, learner: str, message: FromSyncer) -> bytes:
        """Encode a message to this learner."""
        if not isinstance(message, Announce) or any(member.learner == learner for member in message.members):
            return encode(message)
        if self._last is None or self._last[0] is not message:
            self._last = (message, encode(message))
        return self._last[1]


class SendQueue:
    def __init__(self, limit: int, limit_bytes: int = 1 << 62) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._bytes = 0
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.closed = False

    def put(self, data: bytes) -> bool:
        """False if it is closed or full."""
        if self.closed or len(self._waiting) >= self._limit or self._bytes + len(data) > self._limit_bytes:
            return False
        self._waiting.append(data)
        self._bytes += len(data)
        self._news.set()
        return True

    def close(self, *, discard: bool = False) -> None:
        """Nothing more goes in; what is inside still goes out unless `discard`."""
        self.closed = True
        if discard:
            self._waiting.clear()
        self._news.set()

    async def drain(self, send: Callable[[bytes], Awaitable[None]], deadline_s: float) -> None:
        """Send everything in order until closed and empty. TimeoutError if the peer does not take a message in time."""
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                self._bytes -= len(data)
                async with asyncio.timeout(deadline_s):
                    await send(data)
            if self.closed:
                return
            self._news.clear()
            await self._news.wait()


LOOKS = 4
"""A wait is made of so many parts: a loop that stood still uses up one of them, and reads the answer in the next."""


class PeerPing:
    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        self._ping = ping
        self._heard = asyncio.Event()
        self._asking = 0

    def note(self) -> None:
        """It has sent something."""
        self._heard.set()

    async def answers(self, within_s: float) -> bool:
        if not self._asking:
            self._heard.clear()
        self._asking += 1
        try:
            return await self._ask(within_s)
        finally:
            self._asking -= 1

    async def _ask(self, within_s: float) -> bool:
        with suppress(OSError):  # a TimeoutError is one: it takes nothing in
            if self._asking == 1:
                async with asyncio.timeout(within_s):
                    await self._ping()
        for _ in range(LOOKS):
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s / LOOKS):
                    await self._heard.wait()
        return self._heard.is_set()


# ---- sequence numbers -----------------------------------------------------------------------------------------------

M = TypeVar("M", bound=FromLearner)


class SequenceNumbers:
    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By learner and session; the one that was heard longest ago first."""

    def __len__(self) -> int:
        return len(self._last)

    def check(self, channel: ControlChannel, message: FromLearner) -> None:
        """PeerError if it was said before, or has no number."""
        last, what = self._last.get((channel.learner, channel.session), 0), type(message).__name__
        if not message.seq:
            raise PeerError(f"{what} of {channel.learner} has no number: every message of a learner has one")
        if message.seq <= last:
            raise PeerError(
                f"{what} {message.seq} of {channel.learner} comes after {last}: it was said before, and counts once"
            )

    def note(self, channel: ControlChannel, message: FromLearner) -> None:
        key = (channel.learner, channel.session)
        self._last[key] = message.seq
        self._last.move_to_end(key)
        if len(self._last) > self._most:
            self._last.popitem(last=False)


def unnumbered(message: M) -> M:
    """As the service gets it: numbers belong to the wire."""
    return replace(message, seq=0)


# ---- WebSockets, as both ends hold them -----------------------------------------------------------------------------


class ClientSocket(aiohttp.ClientWebSocketResponse):
    """The learner's end."""

    def _pong_not_received(self) -> None:
        if not self._need_heartbeat_reset:  # else something has come from it just now
            super()._pong_not_received()


class ServerSocket(web.WebSocketResponse):
    """The syncer's end."""

    def _pong_not_received(self) -> None:
        if not self._need_heartbeat_reset:
            super()._pong_not_received()
