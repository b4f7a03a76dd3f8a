"""One round: gathering learners, pulling a fragment from frozen members, merging, committed or passed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from atoll.protocol.messages import Contribution

Stage = Literal["gathering", "pulling", "merging", "void"]
"""void: failed for good, and waits for its turn to be passed over."""
SeatState = Literal["asked", "given", "out"]


@dataclass(slots=True)
class Seat:
    """A frozen member: (learner, incarnation, t_m), and what came of its pull."""

    learner: str
    incarnation: int
    t: int
    included_before: int
    """Its step at the inclusion before this one, should the round be void."""
    state: SeatState = "asked"
    contribution: Contribution | None = None
    why_out: str = ""

    @property
    def answer(self) -> Contribution:
        assert self.contribution is not None, "only a seat that has given has an answer"
        return self.contribution

    def give(self, contribution: Contribution) -> None:
        self.state, self.contribution = "given", contribution

    def leave(self, reason: str) -> None:
        self.state, self.why_out = "out", reason


@dataclass(slots=True)
class Round:
    t: int
    fragment: int
    opened_at: float
    roster: frozenset[str] = frozenset()
    """Who was live at the opening; the synchronous rule waits for these."""
    stage: Stage = "gathering"
    attempt: int = 1
    quorum_at: float | None = None
    due_at: float | None = None
    frozen_at: float = 0.0
    answered_at: float = 0.0
    """When the last contribution came; misses do not count, or each would stretch the next deadline."""
    grace_s: float = 0.0
    deadline: float = 0.0
    live: int = 0
    """Learners alive and recovered when it was frozen: members, and those that are not ready or muted."""
    reason: str = ""
    seats: dict[str, Seat] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """What each member's contribution counts, from its merge on."""

    @property
    def given(self) -> list[Seat]:
        """In the fixed order of merging: by learner id."""
        return [self.seats[name] for name in sorted(self.seats) if self.seats[name].state == "given"]

    @property
    def asked(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.state == "asked"]

    def again(self, now: float) -> None:
        """Back to gathering, for a second and last attempt."""
        self.stage, self.attempt = "gathering", self.attempt + 1
        self.opened_at, self.quorum_at = now, None
        self.seats = {}
