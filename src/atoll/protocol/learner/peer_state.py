"""Both sides of a recovery: `Seeking` (the newcomer), `Helping` (the peer).

A peer's state holds no parameters: those are the run's committed versions, which the newcomer fetches from the syncer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import ge

import msgspec

from atoll.protocol.learner.effects import (
    Await,
    Begin,
    Capture,
    Captured,
    Dispose,
    FetchState,
    Give,
    LearnerEffect,
    LeaveState,
    PassOn,
    StateCame,
    StateFailed,
    TakeBack,
    Taken,
    TakeState,
)
from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import Fresh, FromLearner, Help, Helped, Ready, Release, Seek, Settled, Stream, Unable


class Seeking:
    """The newcomer: it asks for a peer's state, fetches it, and has the training process take it.

    Until the state is taken, or the newcomer is told that there is none, it is not recovered. The syncer decides which
    peer it is and how long that may take; a newcomer that reconnects asks anew. If it refuses a state it reports that,
    and waits for another.
    """

    def __init__(self, do: Callable[[LearnerEffect], None], say: Callable[[float, FromLearner], None]) -> None:
        self._do, self._say = do, say
        self.open = False
        self.frozen = False
        """Frozen parameters are sought too."""
        self._helped: Helped | None = None
        """What it fetches, or has fetched and not taken yet."""
        self._outcome = ""
        """What it came to, until that is told."""

    def begin_seeking(self, now: float, after: int, *, frozen: bool = False) -> None:
        """Ask for a peer; once more after a reconnect: the syncer may be another one."""
        self.open, self._outcome, self.frozen = True, "", frozen
        self._do(Await())
        self._say(now, Seek(after=after, frozen=frozen))

    def hear_answer(self, message: Helped | Fresh) -> None:
        match message:
            case Fresh(reason=reason):
                self.stop_seeking(f"goes on with its own inner optimizer, which warms up where it is fresh: {reason}")
            case Helped() if self.open:
                self._leave_state()
                self._helped = message
                self._do(FetchState(message.ticket, message.size, message.digest, message.direct))

    def note_outcome(self, now: float, event: StateCame | StateFailed | Taken) -> None:
        """What became of what it was told to fetch; older tickets are ignored."""
        if (helped := self._helped) is None or helped.ticket != event.ticket:
            return
        match event:
            case StateCame(ticket):
                self._do(TakeState(ticket))
            case StateFailed(ticket, reason):
                self._helped = None
                self._say(now, Settled(ticket=ticket, peer=helped.peer, reason=reason, again=True))
            case Taken():
                self._helped = None
                self._report_outcome(now, helped, event)

    def _report_outcome(self, now: float, helped: Helped, taken: Taken) -> None:
        """Taken; refused (ask for another peer); or impossible here."""
        size = helped.size if taken.refused or not taken.reason else 0
        said = Settled(ticket=taken.ticket, peer=helped.peer, size=size, t=taken.t, reason=taken.reason)
        self._say(now, msgspec.structs.replace(said, again=taken.refused))
        if not taken.reason:
            self.stop_seeking(f"goes on with the inner optimizer of {helped.peer}")
        elif not taken.refused:
            self.stop_seeking(f"goes on with its own inner optimizer, which warms up: {taken.reason}")

    def stop_seeking(self, text: str) -> None:
        """Settled, one way or the other."""
        if self.open:
            self._leave_state()
            self.open, self._outcome = False, text

    def tell_outcome(self) -> None:
        """Tell the training process, once whatever it goes on with is on order."""
        if self._outcome:
            self._do(Begin(self._outcome))
            self._outcome = ""

    def _leave_state(self) -> None:
        if self._helped is not None:
            self._do(LeaveState(self._helped.ticket))
            self._helped = None


COPIES = 2
"""In memory at once, one being made among them; more newcomers wait for one of them to be let go."""
KEPT_S = 120.0
"""How long a copy is kept, or as long as a slow stream of it takes; usually the syncer says earlier that it may go."""
BYTES_PER_S = 8 * 2**20
"""A slow stream: a large state on a slow link has its time, one that is stuck has not."""


@dataclass(slots=True)
class StateCopy:
    held: list[int]
    """The versions in the model when it was ordered."""
    made: Captured | None = None
    """Set once it is made."""
    until: float = 0.0
    tickets: set[str] = field(default_factory=set)
    frozen: bool = False
    """With frozen parameters, which only those get that ask for them: they may be most of the model."""

    def serves_newcomer(self, wanted: Wanted) -> bool:
        return self.frozen == wanted.frozen and all(map(ge, self.held, wanted.versions))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a copy must have."""

    versions: list[int]
    frozen: bool


class Helping:
    """The peer: it makes copies of its state for newcomers, and goes on training.

    Rules kept here, each with its test: a copy is made only once everything that was committed when it was asked for
    is adopted; one copy serves every newcomer that it is new enough for; at most two are in memory; one that nobody
    wants any more, or that is too old, is deleted.
    """

    def __init__(
        self,
        do: Callable[[LearnerEffect], None],
        say: Callable[[float, FromLearner], None],
        versions: Versions,
    ) -> None:
        self._do, self._say, self._versions = do, say, versions
        self._asked: dict[str, Wanted] = {}
        """Tickets that wait for a copy."""
        self._copies: dict[int, StateCopy] = {}
        self._number = 0

    @property
    def is_helping(self) -> bool:
        """Somebody is being helped."""
        return bool(self._copies or self._asked)

    @property
    def wake_times(self) -> list[float]:
        return [copy.until for copy in self._copies.values() if copy.made is not None]

    def hear_request(self, now: float, message: Help | Stream | Release) -> None:
        match message:
            case Help(ticket=ticket, frozen=frozen):
                # announcements come before it on the same channel: what is committed is known
                self._asked[ticket] = Wanted(list(self._versions.newest), frozen)
            case Stream(ticket=ticket, offset=offset):
                self._start_stream(now, ticket, offset)
            case Release(ticket=ticket):
                self._release_ticket(ticket)

    def take_copy(self, now: float, event: Captured) -> None:
        if (copy := self._copies.get(event.number)) is None or copy.made is not None:
            self._do(Dispose(event.number))
        elif event.reason:
            del self._copies[event.number]
            self._decline_all(now, event.reason)
        else:
            copy.made, copy.until = event, now + max(KEPT_S, event.size / BYTES_PER_S)

    def _start_stream(self, now: float, ticket: str, offset: int) -> None:
        if any(ticket in copy.tickets for copy in self._copies.values()):
            self._do(PassOn(ticket, offset))
        else:
            self._say(now, Unable(ticket=ticket, reason="its copy is gone"))

    def _release_ticket(self, ticket: str) -> None:
        self._asked.pop(ticket, None)
        for number, copy in list(self._copies.items()):
            if ticket in copy.tickets:
                copy.tickets.discard(ticket)
                self._do(TakeBack(ticket))
                if not copy.tickets:
                    self._dispose_copy(number)

    def serve_newcomers(self, now: float, *, able: bool) -> None:
        """Give what fits, order what is missing, let go what has lain too long."""
        for number, copy in list(self._copies.items()):
            if copy.made is not None and now >= copy.until:
                self._dispose_copy(number)
        if not able:
            self._decline_all(now, "it does not train, or has not recovered itself")
        for ticket, wanted in list(self._asked.items()):
            self._give_or_order(now, ticket, wanted)
        for number, copy in list(self._copies.items()):
            if copy.made is not None and not copy.tickets:
                self._dispose_copy(number)

    def forget_requests(self) -> None:
        """The syncer counts on a peer no more whose connection broke: no copy is made for what that one asked."""
        self._asked.clear()

    def forget_copies(self, now: float, reason: str) -> None:
        """It starts over: whatever it had to give is not worth having."""
        self._decline_all(now, reason)
        for number in list(self._copies):
            self._dispose_copy(number)

    def _give_or_order(self, now: float, ticket: str, wanted: Wanted) -> None:
        fit = [(number, copy) for number, copy in self._copies.items() if copy.serves_newcomer(wanted)]
        if ready := [(number, copy.made) for number, copy in fit if copy.made is not None]:
            self._give_copy(now, ticket, *ready[0])
        elif not fit and len(self._copies) < COPIES and self._is_current(wanted.versions) and not self._is_copying():
            self._number += 1
            self._copies[self._number] = StateCopy(list(self._versions.held), frozen=wanted.frozen)
            self._do(Capture(self._number, wanted.frozen))

    def _give_copy(self, now: float, ticket: str, number: int, made: Captured) -> None:
        del self._asked[ticket]
        self._copies[number].tickets.add(ticket)
        self._do(Give(number, ticket))
        said = Ready(ticket=ticket, size=made.size, digest=made.digest, t=made.t, direct=made.direct)
        self._say(now, said)

    def _is_current(self, wanted: list[int]) -> bool:
        held = self._versions.held
        return len(held) == len(wanted) and all(have >= version for have, version in zip(held, wanted, strict=True))

    def _is_copying(self) -> bool:
        return any(copy.made is None for copy in self._copies.values())

    def _decline_all(self, now: float, reason: str) -> None:
        for ticket in list(self._asked):
            del self._asked[ticket]
            self._say(now, Unable(ticket=ticket, reason=reason))

    def _dispose_copy(self, number: int) -> None:
        copy = self._copies.pop(number)
        for ticket in sorted(copy.tickets):
            self._do(TakeBack(ticket))
        if copy.made is not None:
            self._do(Dispose(number))
