"""What the syncer knows of a run: one state, which the rules read and change.

A rule never keeps what another rule needs: that is here. What is durable is in `history`, which follows from the
journal alone; everything else a later term finds out anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from atoll.protocol.history import History
from atoll.protocol.messages import Contribution
from atoll.protocol.records import ChangedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Retune
from atoll.protocol.syncer.membership import Membership
from atoll.protocol.syncer.outbox import Outbox

RunPhase = Literal["empty", "running", "ending", "finished"]
PHASES: dict[RunPhase, tuple[RunPhase, ...]] = {
    "empty": ("running", "finished"),
    "running": ("ending",),
    "ending": ("finished",),
    "finished": ("running", "empty"),
}
"""Phases of a run, and where each leads. *empty*: one learner is asked for version 0 (joining.py). *running*: one
round after another (rounds.py). *ending*: the budget is spent or the operator asked; learners stop, then one unpaced
cycle of P rounds brings their last steps in (ending.py). *finished*: everybody is told; only `--resume` leads back. A
new term starts an ending run as *running*, without a transition, until its learners are back."""
RoundStage = Literal["ahead", "gathering", "pulling", "merging", "void"]
STAGES: dict[RoundStage, tuple[RoundStage, ...]] = {
    "ahead": ("gathering", "void"),
    "gathering": ("pulling", "void"),
    "pulling": ("merging", "gathering", "void"),
    "merging": ("gathering", "void"),
    "void": (),
}
"""Stages of a round, and where each leads. *ahead*: a learner with a narrow link was asked for its contribution before
it is the round's turn to open (`Rounds.pull_ahead`). *gathering*: learners report steps; closing.py decides when the
members are frozen. *pulling*: each member is asked for the fragment, until its deadline. *merging*: the contributions
are merged and the outer step is taken, one round at a time, in order. *void*: failed for good; it waits for its turn to
be passed over. Back to *gathering* once, for a second attempt. A round that is committed or passed over is in no stage
any more: it is removed from `open_rounds`."""
SeatState = Literal["asked", "given", "out"]


@dataclass(slots=True)
class Seat:
    """A frozen member: (learner, incarnation, its step t at the freeze), and what came of its pull."""

    learner: str
    incarnation: int
    t: int
    deadline_s: float
    """Seconds its pull may take."""
    deadline: float = inf
    """Infinite until the pull has left: a learner can be late only with what it was asked for."""
    asked_at: float = 0.0
    """Time at which its pull left."""
    state: SeatState = "asked"
    contribution: Contribution | None = None
    why_out: str = ""

    @property
    def answer(self) -> Contribution:
        assert self.contribution is not None, "only a seat that has given has an answer"
        return self.contribution


@dataclass(slots=True)
class Round:
    """It gathers learners, pulls a fragment from its frozen members, merges, and is committed or passed over."""

    number: int
    fragment: int
    opened_at: float
    roster: frozenset[str] = frozenset()
    """Who was stepping at the opening; the synchronous rule waits for these."""
    last: bool = False
    """It collects last steps at the end of the run: nobody is asked again."""
    stage: RoundStage = "gathering"
    attempt: int = 1
    gave_before: int | None = None
    """How many gave to the first attempt, once there is a second."""
    quorum_at: float | None = None
    due_at: float | None = None
    on_time: frozenset[str] | None = None
    """Who was ready when the grace window opened."""
    overdue: bool = False
    """Whether every ready learner takes part, with or without a turn, because the round was due for too long."""
    frozen_at: float = 0.0
    answered_at: float = 0.0
    """When the last contribution came; misses do not count, or each would stretch the next deadline."""
    merging_at: float = 0.0
    grace_s: float = 0.0
    alive: int = 0
    """Learners alive and recovered when it was frozen: members, and those that are not ready or muted."""
    reason: str = ""
    ready: int = 0
    """Learners that were ready for it when it was last looked at, and those that reported since that they are …"""
    looks_at: int = 0
    """… and how many of them bring the next thing about: its quorum, or its end."""
    waits_for_late: bool = False
    """Whether a learner that steps was late for its fragment the last time …"""
    in_grace: bool = False
    """… and whether it waited for its grace window to end, both at the last look."""
    seats: dict[str, Seat] = field(default_factory=dict)
    answers_missing: int = 0
    """Seats in the state `asked`."""
    answered: bool = False
    """Whether a contribution is here, so that the round does not wait for members that fall silent."""
    watched: bool = False
    """Whether a look at the rounds has followed that, which set the time at which the next member is silent."""
    weights: dict[str, float] = field(default_factory=dict)
    """What each member's contribution counts, from its merge on …"""
    limits: dict[str, float] = field(default_factory=dict)
    """… and how many times the median of all but the largest it may (weights.py)."""

    def add_seat(self, seat: Seat) -> None:
        self.seats[seat.learner] = seat
        self.answers_missing += 1

    def take_answer(self, seat: Seat, contribution: Contribution) -> None:
        seat.state, seat.contribution = "given", contribution
        self.answers_missing -= 1
        self.answered = True

    def leave_out(self, seat: Seat, reason: str) -> None:
        self.answers_missing -= seat.state == "asked"
        seat.state, seat.why_out = "out", reason

    def take_seats_of(self, ahead: Round) -> None:
        self.seats, self.answers_missing = ahead.seats, ahead.answers_missing

    @property
    def given(self) -> list[Seat]:
        """In the fixed order of merging: by learner name."""
        return [self.seats[name] for name in sorted(self.seats) if self.seats[name].state == "given"]

    @property
    def asked(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.state == "asked"]

    def has_seat(self, learner: str) -> bool:
        """Whether the learner was asked for this round and is not left out."""
        return learner in self.seats and self.seats[learner].state != "out"

    @property
    def is_under_way(self) -> bool:
        """Whether the round is between freezing and commit."""
        return self.stage not in ("ahead", "gathering")

    def put_off(self, now: float, seconds: float) -> None:
        """The syncer stood still for so long: what it waits for has so much more time. Times are moved to at most now,
        or a window would stay open for as long again."""
        self.frozen_at = min(now, self.frozen_at + seconds)
        for seat in self.seats.values():
            seat.deadline += seconds
            seat.asked_at = min(now, seat.asked_at + seconds)
        self.quorum_at = None if self.quorum_at is None else min(now, self.quorum_at + seconds)
        self.due_at = None if self.due_at is None else min(now, self.due_at + seconds)

    def enter_stage(self, stage: RoundStage) -> None:
        assert stage in STAGES[self.stage], f"a round that is {self.stage} cannot be {stage} next"
        self.stage = stage

    def gather_again(self, now: float) -> None:
        """Back to gathering, for a second and last attempt."""
        self.enter_stage("gathering")
        self.attempt, self.gave_before = self.attempt + 1, len(self.given)
        self.opened_at, self.due_at, self.quorum_at, self.on_time = now, now, None, None
        self.overdue = False
        self.seats, self.answers_missing = {}, 0
        self.answered = self.watched = self.in_grace = False


class SyncerState:
    def __init__(self, history: History) -> None:
        """Of a run that has just begun, or of one that an earlier term left behind: rounds that were not committed are
        void."""
        self.history = history
        self.out = Outbox(history)
        self.phase: RunPhase = _phase_of(history)
        self.end_reason = history.ended
        """Why the run ends, once it does."""
        self.members = Membership(history.settings)
        for name, life in history.lives.items():
            self.members.remember_life(name, life)
        self.members.recall_progress(history.progress)
        self.members.least[:] = history.least
        self.versions = list(history.versions)
        """The committed version of each fragment; −1: none yet."""
        self.committed = history.committed
        """Rounds behind us, empty ones included: the syncer's own entry in vector clocks."""
        self.next_round = history.committed
        self.open_rounds: dict[int, Round] = {}
        """By number, in order."""
        self.draining = False
        """The run ends: the last steps are collected, unpaced."""
        self.gave_no_answer: set[str] = set()
        """Learners that had their time to give last steps, and missed it: they are asked for no more."""
        self.changing_rounds = False
        """H, τ or adoption change once no round is under way: none is frozen until then."""

    @property
    def settings(self) -> Settings:
        return self.history.settings

    def change_settings(self, record: ChangedRecord) -> None:
        """What it says holds from now on, and is written down like a round."""
        self.out.persist(record)
        self.out.add_effect(Retune(record.outer))
        self.members.settings = self.history.settings

    def enter_phase(self, phase: RunPhase, reason: str = "") -> None:
        assert phase in PHASES[self.phase], f"a run that is {self.phase} cannot be {phase} next"
        self.phase, self.end_reason = phase, reason

    def reopen(self) -> None:
        """A run that had ended, or had begun to, goes on; the history says so already."""
        if (phase := _phase_of(self.history)) != self.phase:
            self.enter_phase(phase)
        self.end_reason = self.history.ended

    @property
    def gathering_round(self) -> int:
        """The number of the round that gathers now, or will next."""
        first = (r.number for r in self.open_rounds.values() if r.stage == "gathering" and r.attempt == 1)
        return min(first, default=self.next_round)

    @property
    def furthest_round(self) -> int:
        """No learner can have copied, or order, a fragment for a round past this one: a synchronous one orders what is
        due while it waits for a round, and each fragment is under way once."""
        return self.next_round + 2 * self.settings.fragments

    def has_frozen_rounds(self) -> bool:
        """Whether rounds are between freezing and commit."""
        return any(round_.is_under_way for round_ in self.open_rounds.values())

    def is_merging(self) -> bool:
        return any(round_.stage == "merging" for round_ in self.open_rounds.values())


def _phase_of(history: History) -> RunPhase:
    """As far as an earlier term came."""
    return "finished" if history.finished else "running" if history.started else "empty"
