"""Where a run stands.

Its way: *empty* (the first joiner is asked for version 0, joining.py) → *running* (rounds.py, one round after
another) → *ending* (budget spent or the operator asked: learners stop, then one unpaced cycle of P rounds brings their
last steps in, ending.py) → *finished*. A new term takes up a run that had begun to end as *running*, until its learners
are back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from atoll.protocol.history import History
from atoll.protocol.messages import Contribution

Phase = Literal["empty", "running", "ending", "finished"]


@dataclass(slots=True)
class RunPhase:
    phase: Phase
    reason: str = ""
    """Why it ends, once it does."""

    @classmethod
    def of(cls, history: History) -> RunPhase:
        """As far as an earlier term came."""
        return cls("finished" if history.finished else "running" if history.started else "empty", history.ended)


# One round: gathering learners, pulling a fragment from frozen members, merging, committed or passed over.

Stage = Literal["gathering", "pulling", "merging", "void"]
"""void: failed for good, and waits for its turn to be passed over."""
SeatState = Literal["asked", "given", "out"]


@dataclass(slots=True)
class Seat:
    """A frozen member: (learner, incarnation, t_m), and what came of its pull."""

    learner: str
    incarnation: int
    t: int
    deadline_s: float
    """What its pull may take."""
    deadline: float = inf
    """Infinite until the pull has left: a learner can be late only with what it was asked for."""
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
    on_time: frozenset[str] | None = None
    """Who was ready when the grace window opened."""
    frozen_at: float = 0.0
    answered_at: float = 0.0
    """When the last contribution came; misses do not count, or each would stretch the next deadline."""
    grace_s: float = 0.0
    live: int = 0
    """Learners alive and recovered when it was frozen: members, and those that are not ready or muted."""
    reason: str = ""
    seats: dict[str, Seat] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """What each member's contribution counts, from its merge on …"""
    limits: dict[str, float] = field(default_factory=dict)
    """… and how many times the median of the others it may (weights.py)."""

    @property
    def given(self) -> list[Seat]:
        """In the fixed order of merging: by learner id."""
        return [self.seats[name] for name in sorted(self.seats) if self.seats[name].state == "given"]

    @property
    def asked(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.state == "asked"]

    def put_off(self, now: float, seconds: float) -> None:
        """The syncer stood still for so long: what it waits for has so much more time. What it noticed since then
        happened now at the latest, or a window would stay open for as long again."""
        self.frozen_at = min(now, self.frozen_at + seconds)
        for seat in self.seats.values():
            seat.deadline += seconds
        self.quorum_at = None if self.quorum_at is None else min(now, self.quorum_at + seconds)
        self.due_at = None if self.due_at is None else min(now, self.due_at + seconds)

    def again(self, now: float) -> None:
        """Back to gathering, for a second and last attempt."""
        self.stage, self.attempt = "gathering", self.attempt + 1
        self.opened_at, self.quorum_at, self.on_time = now, None, None
        self.seats = {}
