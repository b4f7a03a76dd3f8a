"""What a server needs from the service behind it: handlers for a learner's messages and bodies, and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.wire import ScoreReport
from atoll.protocol.messages import FromLearner, Hello


@dataclass(frozen=True, slots=True)
class ServedFragment:
    """A committed fragment, held until `release` is called."""

    version: int
    round: int
    digest: str
    data: memoryview
    release: Callable[[], None]
    on_cut: Callable[[Callable[[], None]], None] = lambda cut: None
    """Told how to cut the reader off: one that is too slow must not keep versions that are long past."""
    steps: tuple[tuple[str, memoryview], ...] = ()
    """Sent instead of `data` where there are any: digest and bytes of every step from what the reader holds to this
    version. `digest` is of the version's values in any case."""
    codec: str = ""
    """Form of `data`, and what `digest` is of: "bf16" (numerics/initial.py), or empty for the values themselves."""

    @property
    def body(self) -> list[memoryview]:
        return [step for _, step in self.steps] or [self.data]


class Handlers(Protocol):
    """The service behind a server; every call comes on the event loop and must return soon.

    A PeerError raised by any of them is told to the peer in one line and costs nobody else anything.
    """

    def opened(self, channel: ControlChannel, hello: Hello) -> None:
        """A learner said hello. Close the channel in here to refuse it; an older one of the same learner then stays.

        Otherwise the older one is replaced: it is closed, and nothing more is heard of it.
        """

    def received(self, channel: ControlChannel, message: FromLearner) -> None: ...

    def closed(self, channel: ControlChannel, reason: str) -> None:
        """Once for every channel that was accepted and not replaced, whoever closed it."""

    def expect_contribution(
        self, learner: str, session: str, round: int, attempt: int, named: int, rank: int
    ) -> memoryview:
        """The writable buffer a contribution goes into, of its exact size; PeerError if it was not asked for. `named`:
        the bytes that its sender says it has. `rank`: of a learner of several, whose part it is; else 0."""
        ...

    def contribution_arrived(self, learner: str, round: int, attempt: int, digest: str, rank: int) -> None:
        """Whole; the digest is the server's own, and the one the learner named."""

    def contribution_aborted(self, learner: str, round: int, attempt: int, reason: str, rank: int) -> None:
        """The buffer is free again; what is in it is worth nothing."""

    def expect_initial(self, learner: str, session: str, fragment: int, rank: int, codec: str) -> memoryview:
        """Return the buffer for a body of version 0. `codec`: its form, "bf16", or empty for fp32."""
        ...

    async def initial_arrived(
        self,
        learner: str,
        session: str,
        fragment: int,
        body: memoryview,
        digest: str,
        rank: int,
        codec: str,
        loss: float,
    ) -> None:
        """`loss`: the relative error that its sender measured when it rounded its parameters."""

    def fragment(self, index: int, have: int, codec: str) -> ServedFragment:
        """`have`: the version that the reader says it holds; −1: none. `codec`: a form that it can read beside fp32."""
        ...

    async def fragment_of_rank(self, index: int, learner: str, rank: int, codec: str) -> ServedFragment:
        """What a rank of a learner holds of the fragment's newest version, never as steps."""
        ...

    def moments(self, index: int, version: int) -> ServedFragment:
        """The averaged moments that were adopted with this version of a fragment; PeerError: they are not here."""
        ...

    def forwarding_wanted(self, ticket: str, learner: str, start: int) -> None:
        """A newcomer waits for its peer's state from this byte on: ask the peer for it; PeerError if it may not.

        Called again, with a later byte, after a break; another peer may be asked then.
        """

    def forwarding_allowed(self, ticket: str, learner: str) -> None:
        """PeerError unless this learner is the peer of that ticket."""

    def status(self) -> bytes: ...

    def manifest(self) -> bytes: ...

    def score(self, score: ScoreReport) -> None: ...

    def evaluator_here(self) -> None:
        """An evaluator says that it is there."""

    async def change(self, words: Sequence[str]) -> str:
        """Settings that the operator changes; what has changed, once it is durable."""
        ...

    def turned_away(self, address: str, reason: str) -> None:
        """Somebody was not let in."""

    async def drain(self, learner: str) -> str:
        """Have a learner leave in good order; what came of it, once it has heard. PeerError: it cannot be asked."""
        ...


class ServedPages(Protocol):
    """They only read: nothing a browser sends changes anything."""

    @property
    def sockets(self) -> frozenset[str]:
        """Paths of WebSockets that web pages may open. Whoever serves them looks at the origin."""
        ...

    def routes(self) -> Sequence[web.RouteDef]: ...

    def sweep(self, gone: Callable[[str, str], str]) -> None:
        """Send away whoever is looking by a token that counts no more; `gone` says why, or nothing."""
        ...

    def close(self) -> None:
        """Send everybody away who is looking: the port closes."""
        ...
