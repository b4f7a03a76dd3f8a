"""What a server asks of whoever stands behind it, and what it hands over: a channel per learner, bytes into buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.fabric.liveness import Liveness
from atoll.fabric.outbox import Outbox
from atoll.fabric.wire import Score, encode, one_line, understood
from atoll.protocol.messages import PROTOCOL, FromLearner, FromSyncer, Hello
from atoll.protocol.succession import Holder


class Channel:
    """One learner's control channel, after its hello. Belongs to the event loop."""

    def __init__(
        self,
        learner: str,
        session: str,
        *,
        outbox: Outbox,
        abort: Callable[[], None],
        flush_s: float,
        token: str = "",
        mark: str = "",
        protocol: int = PROTOCOL,
        holder: Holder | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.learner = learner
        self.session = session
        self.token, self.mark = token, mark
        """The name and the mark of what it showed at the door; no secret."""
        self.protocol = protocol
        """The version that both sides speak on it."""
        self.holder = holder or Holder(session)
        """Who has the learner's name by it."""
        self.liveness = liveness
        """None: nobody is asked."""
        self.reason = ""
        """Why it is closed or closing; empty while it is open."""
        self._outbox = outbox
        self._abort = abort
        self._flush_s = flush_s

    @property
    def closing(self) -> bool:
        return self._outbox.closed

    def send(self, message: FromSyncer) -> None:
        """Never waits. A peer that lets too much pile up loses the channel; what its version lacks it is not told."""
        if not understood(message, self.protocol):
            return
        if not self._outbox.closed and not self._outbox.put(encode(message, self.protocol)):
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


@dataclass(frozen=True, slots=True)
class Served:
    """A committed fragment, held until `release` is called."""

    version: int
    round: int
    digest: str
    data: memoryview
    release: Callable[[], None]
    on_cut: Callable[[Callable[[], None]], None] = lambda cut: None
    """Told how to cut the reader off: one that is too slow must not keep versions that are long past."""


class Handlers(Protocol):
    """The service behind a server; every call comes on the event loop and must return soon.

    A PeerError raised by any of them is told to the peer in one line and costs nobody else anything.
    """

    def opened(self, channel: Channel, hello: Hello) -> None:
        """A learner said hello. Close the channel in here to refuse it; an older one of the same learner then stays.

        Otherwise the older one is replaced: it is closed, and nothing more is heard of it.
        """

    def received(self, channel: Channel, message: FromLearner) -> None: ...

    def closed(self, channel: Channel, reason: str) -> None:
        """Once for every channel that was accepted and not replaced, whoever closed it."""

    def expect_contribution(self, learner: str, session: str, round: int, attempt: int) -> memoryview:
        """The writable buffer a contribution goes into, of its exact size; PeerError if it was not asked for."""
        ...

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str) -> None:
        """Whole; the digest is the server's own, and the one the learner named."""

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str) -> None:
        """The buffer is free again; what is in it is worth nothing."""

    def expect_initial(self, learner: str, session: str, fragment: int) -> memoryview: ...

    def initial_arrived(self, learner: str, fragment: int, digest: str) -> None: ...

    def fragment(self, index: int) -> Served: ...

    def relay_wanted(self, ticket: str, learner: str, start: int) -> None:
        """A newcomer waits for its peer's state from this byte on: ask the peer for it; PeerError if it may not.

        Called again, with a later byte, after a break; another peer may be asked then.
        """

    def relay_allowed(self, ticket: str, learner: str) -> None:
        """PeerError unless this learner is the peer of that ticket."""

    def status(self) -> bytes: ...

    def manifest(self) -> bytes: ...

    def score(self, score: Score) -> None: ...

    def change(self, words: Sequence[str]) -> str:
        """Settings that the operator changes; what has changed."""
        ...

    def turned_away(self, address: str, reason: str) -> None:
        """Somebody was not let in."""

    def drain(self, learner: str) -> str:
        """Have a learner leave in good order; what was done. PeerError: it cannot be asked."""
        ...
