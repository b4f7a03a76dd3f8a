"""When a round closes: which learners are ready, and whether the round may freeze its members now.

An asynchronous round closes when all five hold:

1. Quorum: at least K learners are ready (`judge`). A learner is ready for a fragment if it is live, has made steps on
   it that no version contains, on a base at or past the version that holds its last contribution to it, and has made a
   step since it last declined this fragment (`KnownLearner.is_ready`). A learner is *stepping* if it is live and its
   training loop has not ended. If fewer than K learners step for `patience_s`, as many as there are suffice
   (`lowered_quorum`). If the round has been due for max(`patience_s`, `stalled_after_s`, 8 steps of the slowest
   stepping learner), those that are ready suffice for it (`overdue_at`), with or without a turn. However slow that
   learner is, its step counts for at most 16 of the median learner's (`longest_stall_s`).
2. Pace: H/P steps of the median learner since the last turn was due; at most one such interval, or one step, is
   carried over (`Pace`). The interval is longer where links, merge or disk carry less (`RoundInterval`). A round is due
   only in its turn: no earlier round gathers.
3. Grace: the grace window is over (`window_s`; the quorum policy says how long it is), or every stepping learner is
   ready.
4. No change of H, τ or adoption (a phase of training, or the operator's) waits for the rounds under way
   (`Rounds._must_wait`), and no rollback is under way. A rollback waits for the merge under way, then passes over every
   open round, second attempts too; until it is done, no round advances (`Syncer._advance_all`).
5. Fewer than `RoundInterval.allowed` rounds are pulling, merging or void (interval.py).

A learner that takes part in a share of the rounds is waited for only in those (`without_turn`), and was asked before
(`Rounds.pull_ahead`): it is ready once its contribution is there. With one fragment it is asked like the others.

A second attempt is due at once: it waits for no pace, turn, change or free flight, since rounds behind it may be
frozen, and commit after it. It waits for its quorum and a grace window of its own.

A synchronous round closes when every learner that was stepping at its opening, and still is, has copied the fragment
(`judge_all`), and 4 and 5 hold.

At the end of a run, rounds come one at a time (`LastCycle`, ending.py). Each is opened once every reachable learner has
stopped and holds the version with its last contribution, or has been waited for long enough. It closes at once, with
whoever has stopped and has steps left.

A learner whose training loop has ended is asked for its last steps, but no round waits for it. If only such learners
are left, no pace applies, and rounds that would collect nothing are passed over.

A new term opens no round until the learners it knows are back or have had `RETURN_S` for it (`Assembly`, ending.py).
A report that makes no learner ready for a round that is due, or too few, is counted and nothing more
(`Syncer._is_quiet`), so that it costs the same whatever the number of learners is. So a rule that closes a round
before it is due has to be in `Rounds.any_becomes_due` too, one that looks at something else than who is ready in
`RoundClosing.note_ready`, and one whose moment follows from step times in `RoundClosing.next_end`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from atoll.protocol import schedule
from atoll.protocol.messages import RoundShare
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import Average
from atoll.protocol.syncer.budget import Alone, believed_rate
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.quorums import load_policy
from atoll.protocol.syncer.state import Round, SyncerState

DEADLINE_RATIO = 4
"""A pull times out after this many times its usual duration."""
OWN_STEPS = 1.5
"""After this many of its own step times a learner has surely passed a step boundary."""


class RoundClosing:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self.estimates = Estimates()
        self.pace = Pace(schedule.interval(state.settings))
        self._names: list[str] = []
        """Names of the learners that set the pace."""
        self._short_since: float | None = None
        """Since when fewer learners step than the quorum asks for."""

    @property
    def grace_s(self) -> float:
        """The grace window of a round that no learner was late for."""
        return self._wait_s(0.0)

    def _wait_s(self, late_s: float) -> float:
        settings = self.state.settings
        wait_s = load_policy(settings.quorum_policy)
        return wait_s(grace_s(self.state.members.step_s(), self.estimates, settings), late_s)

    @property
    def deadline_s(self) -> float:
        """The timeout of a pull whose copy is ready."""
        return self.estimates.pull_deadline_s(self.state.settings, self.state.members.answer_s())

    @property
    def last_deadline_s(self) -> float:
        """The timeout of a pull for last steps. It is the last chance: whoever takes longer to encode or to send than
        rounds usually wait for has its time. Only one that reports and never answers uses all of it, once."""
        return max(self.deadline_s, self.state.settings.assemble_s)

    @property
    def deadlines(self) -> Deadlines:
        """The timeouts of pulls whose copies are not ready yet."""
        members = self.state.members
        return Deadlines(self.state.settings, members.step_s(), members.answer_s(), self.deadline_s)

    def follow_members(self, now: float) -> bool:
        """Look which learners step now. Returns whether that changed."""
        stepping = self.state.members.stepping_learners()
        names = [one.name for one in stepping]
        changed = names != self._names
        if changed:
            self._names = names
            self.pace.set_members({one.name: one.t for one in stepping}, now)
            self._give_full_shares(stepping)
        if len(stepping) >= self.state.settings.quorum:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        return changed

    def _give_full_shares(self, stepping: list[KnownLearner]) -> None:
        """Let all learners take part in every round if none with a full share is left. Shares change at commits only,
        and a round in which no learner has a turn is not committed."""
        if any(learner.share == 1.0 for learner in stepping):
            return
        reason = "no learner with a wider link trains any more: it takes part in every round"
        for learner in stepping:
            learner.share = 1.0
            self.state.out.send(learner.name, RoundShare(share=1.0, reason=reason))
            self.state.out.note("share", f"{learner.name}: {reason}", learner, share=1.0)

    def count_steps(self, now: float, learner: KnownLearner) -> None:
        """It has reported its steps. A synchronous run's step follows from its rounds alone."""
        if not self.state.settings.synchronous:
            self.pace.move_learner(learner.name, learner.t, now, lambda: self._rate_alone(now, learner))

    def _rate_alone(self, now: float, learner: KnownLearner) -> float | None:
        """Steps a second that count while it alone makes steps; None: no limit, since no other learner is expected
        back, or the run has no budget of steps."""
        steps = self.state.settings.steps
        others = self.state.members.step_rates(now, learner) if steps else None
        return None if others is None else believed_rate(others, steps, APART)

    def count_round(self) -> None:
        """One more round is behind the run. In a synchronous run that is H/P steps, but not in its last cycle: those
        rounds collect what is left and take no steps."""
        if self.state.settings.synchronous and not self.state.draining:
            self.pace.clock = self.pace.step = schedule.step_after(self.pace.clock, 1, self.state.settings)

    def ready_learners(self, round_: Round) -> list[KnownLearner]:
        some = self.state.members.reachable_learners() if self.state.draining else self.state.members.live_learners()
        return [one for one in some if self._is_ready(one, round_)]

    def due_rounds(self) -> list[Round]:
        """Those that gather and would close with more learners ready: one, or with second attempts a few."""
        rounds = self.state.open_rounds.values()
        return [one for one in rounds if one.stage == "gathering" and one.due_at is not None]

    def due_rounds_ready_for(self, learner: KnownLearner) -> dict[int, bool]:
        """By number, the rounds that are due, and whether the learner is ready for each."""
        return {one.number: learner.live and self._is_ready(learner, one) for one in self.due_rounds()}

    def note_ready(self, learner: KnownLearner, before: dict[int, bool]) -> bool:
        """Count the learner where its report made it ready for a round. False: somebody has to look at the rounds."""
        for number, ready in self.due_rounds_ready_for(learner).items():
            round_ = self.state.open_rounds[number]
            if before.get(number, not ready) == ready:
                continue
            round_.ready += 1
            if not ready or round_.ready >= round_.looks_at:
                return False
        return True

    def without_turn(self, round_: Round) -> list[KnownLearner]:
        """Return the stepping learners that have no part in this round: it is not one of their share, or they were
        asked ahead and had nothing to give."""
        if self.state.draining or self.state.settings.synchronous:
            return []
        return [learner for learner in self.state.members.stepping_learners() if not self._has_part(learner, round_)]

    def _is_ready(self, one: KnownLearner, round_: Round) -> bool:
        if not one.may_give(round_.fragment):
            return False
        if self.state.draining or one.stopped:
            return self.has_last_steps(one, round_.fragment)
        if self.state.settings.synchronous:
            return one.offers_from <= round_.number <= one.offer
        if (seat := round_.seats.get(one.name)) is not None:  # an attempt asks once, ahead or when it freezes
            return seat.state == "given"
        return self._has_part(one, round_) and one.is_ready(round_.fragment)

    def _has_part(self, one: KnownLearner, round_: Round) -> bool:
        """Return whether this round is one of the learner's share, is overdue, or would else have nobody. With one
        fragment no learner can be asked ahead, since the round before takes the same fragment: a learner with a share
        is asked in its turn."""
        if (seat := round_.seats.get(one.name)) is not None:
            return seat.state != "out"
        if self.state.settings.fragments == 1 and schedule.has_turn(round_.number, one.share, self.state.settings):
            return True
        return one.share == 1.0 or round_.overdue or self._has_nobody(round_)

    def _has_nobody(self, round_: Round) -> bool:
        """Return whether all learners have a share of the rounds, and none was asked for this one."""
        if any(learner.share == 1.0 for learner in self.state.members.stepping_learners()):
            return False
        return all(seat.state == "out" for seat in round_.seats.values())

    def has_last_steps(self, one: KnownLearner, fragment: int) -> bool:
        """Its training loop has ended, and it can be asked for what is left of this fragment."""
        return one.stopped and one.has_more(fragment) and one.name not in self.state.gave_no_answer

    def note_overdue(self, now: float, round_: Round) -> None:
        """Mark the round as overdue once it is, before a look at who is ready: then learners without a turn are too."""
        if round_.due_at is not None and not self.state.settings.synchronous and not self.state.draining:
            longest_s = self.state.members.longest_stall_s()
            round_.overdue = round_.overdue or now >= overdue_at(round_.due_at, longest_s, self.state.settings)

    def judge_round(
        self, now: float, round_: Round, ready: list[KnownLearner], *, in_turn: bool, wakes: list[float]
    ) -> Verdict:
        if self.state.draining:
            return Verdict(bool(ready), f"the last steps of {count_learners(len(ready))}")
        if self.state.settings.synchronous:
            return judge_all(ready=len(ready), missing=self._count_missing(round_, ready))
        if round_.due_at is None and in_turn:
            if not self._is_paced(round_) or self.pace.is_due(now):
                round_.due_at = now
            else:
                wakes.append(self.pace.free_at)
        quorum = self._current_quorum(now, round_, len(ready), wakes)
        if len(ready) < quorum:
            round_.quorum_at = round_.on_time = None  # one that was ready is gone: the next quorum has its own window
        elif round_.quorum_at is None:
            round_.quorum_at = now
        self._note_on_time(round_, ready)
        awaited = self.count_awaited(round_, ready)
        round_.ready, round_.looks_at = len(ready), quorum if len(ready) < quorum else awaited
        round_.waits_for_late = self._waits_for_late(round_)
        verdict = judge(now, ready=len(ready), awaited=awaited, quorum=quorum, grace_ends=self._grace_ends(round_))
        round_.in_grace = verdict.until is not None
        return verdict

    def count_awaited(self, round_: Round, ready: list[KnownLearner]) -> int:
        """Count the learners that step and have a part in this round, and those that are ready though their training
        loop has ended: without the latter, one of them would stand in for a learner that still steps, and the round
        would not wait for that one."""
        names = {learner.name for learner in (*self.state.members.stepping_learners(), *ready)}
        return len(names - {learner.name for learner in self.without_turn(round_)})

    def note_frozen(self, now: float, round_: Round) -> None:
        """Book what the gathering took."""
        self._note_late(round_)
        quorum_at, due_at = round_.quorum_at or now, round_.due_at or now
        round_.grace_s = max(0.0, now - max(quorum_at, due_at))
        if round_.attempt > 1:
            return  # the first attempt used the turn, and due-to-quorum would include its pulls
        self.pace.use_turn(now)
        if not self.state.draining and not self.state.settings.synchronous:
            self.estimates.quorum_s.add(max(0.0, quorum_at - due_at))

    def is_behind_all(self, round_: Round) -> bool:
        """Synchronous: whether every learner has gone past a round that none of them can give to."""
        if not self.state.settings.synchronous or self.state.draining:
            return False
        stepping = self.state.members.stepping_learners()
        may_give = any(self._is_ready(one, round_) or _may_yet_copy(one, round_) for one in stepping)
        return bool(stepping) and not may_give

    def is_skipped(self, round_: Round) -> bool:
        """Whether only last steps are left to collect, and none of this fragment."""
        left = self._only_last_steps()
        return bool(left) and not any(one.steps[round_.fragment] for one in left)

    def _is_paced(self, round_: Round) -> bool:
        """False for a second attempt, and where nobody steps any more."""
        return round_.attempt == 1 and not self._only_last_steps()

    def _only_last_steps(self) -> list[KnownLearner]:
        """Learners with last steps to give, if nobody steps any more; else none."""
        if self.state.draining or self.state.members.stepping_learners():
            return []
        return [one for one in self.state.members.live_learners() if any(one.steps)]

    def _count_missing(self, round_: Round, ready: list[KnownLearner]) -> int:
        """Synchronous: learners that were stepping when the round opened, still are, and have yet to copy it."""
        names = round_.roster - {one.name for one in ready}
        return sum(one.name in names and _may_yet_copy(one, round_) for one in self.state.members.stepping_learners())

    def _current_quorum(self, now: float, round_: Round, ready: int, wakes: list[float]) -> int:
        """K, or as many as step once too few of them did for `patience_s`. One of these may never be ready, since it
        cannot fetch a version, and its steps look healthy: so as many as are ready suffice for a round that was due for
        as long as a learner that makes no steps would have had, whoever came and went meanwhile."""
        quorum, settings = self.state.settings.quorum, self.state.settings
        if without_turn := len(self.without_turn(round_)):
            quorum = lowered_quorum(quorum, len(self.state.members.stepping_learners()) - without_turn)
        if round_.due_at is not None:
            until = overdue_at(round_.due_at, self.state.members.longest_stall_s(), settings)
            wakes.append(until)
            if now >= until:
                return max(1, min(quorum, ready))
        if self._short_since is not None:
            until = self._short_since + settings.patience_s
            wakes.append(until)
            if now >= until:
                return lowered_quorum(quorum, len(self.state.members.stepping_learners()))
        return quorum

    def put_off(self, now: float, seconds: float) -> None:
        """The syncer stood still for so long: nobody could report meanwhile."""
        if self._short_since is not None:
            self._short_since = min(now, self._short_since + seconds)

    def _grace_ends(self, round_: Round) -> float | None:
        """Return when the window ends, by the step times of now and the late learners of the last look."""
        if round_.quorum_at is None or round_.due_at is None:
            return None
        window_s = self._window_s(waits_for_late=round_.waits_for_late)
        return max(round_.quorum_at, round_.due_at) + window_s

    def window_s(self, round_: Round) -> float:
        """The grace window of this round. If a learner was late for this fragment the last time, the round waits for up
        to one step: otherwise that learner would miss this fragment every time, since a new version takes nearly H
        steps to come round. The wait is at most the steps from one round to the next, so it does not delay that one."""
        return self._window_s(waits_for_late=self._waits_for_late(round_))

    def _window_s(self, *, waits_for_late: bool) -> float:
        step_s = self.state.members.step_s()
        if not waits_for_late or step_s is None:
            return self.grace_s
        return self._wait_s(min(self.state.settings.grace_cap_steps, self.pace.interval) * step_s)

    def _waits_for_late(self, round_: Round) -> bool:
        stepping = self.state.members.stepping_learners()
        return any(round_.fragment in learner.late for learner in stepping if learner.share == 1.0)

    def next_end(self, due: list[Round]) -> float:
        """Return when the first of these rounds closes with what it has, or is overdue, unless that was so at the last
        look. Both follow from step times, which every report moves: a window may end before the moment that the last
        look set."""
        longest_s, ends = self.state.members.longest_stall_s(), [inf]
        for round_ in due:
            assert round_.due_at is not None
            if not round_.overdue:
                ends.append(overdue_at(round_.due_at, longest_s, self.state.settings))
            if round_.in_grace and (grace_ends := self._grace_ends(round_)) is not None:
                ends.append(grace_ends)
        return min(ends)

    def _note_on_time(self, round_: Round, ready: list[KnownLearner]) -> None:
        """Remember who was ready when the grace window opened."""
        if round_.quorum_at is not None and round_.due_at is not None and round_.on_time is None:
            round_.on_time = frozenset(one.name for one in ready)

    def _note_late(self, round_: Round) -> None:
        for one in self.state.members.stepping_learners():
            if round_.on_time is None or one.name in round_.on_time:
                one.late.discard(round_.fragment)
            else:
                one.late.add(round_.fragment)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The timeouts of pulls, by the medians of all learners as they are now."""

    settings: Settings
    step_s: float | None
    answer_s: float | None
    deadline_s: float

    def of(self, one: KnownLearner) -> float:
        """The timeout of a pull from this learner:

        max(answer, min(1.5 of its own steps, max(1, τ)·ξ_step)),   answer = min(deadline_s, max(floor, 4 ξ_answer))

        So it may reach its next step boundary, within the overlap. A newcomer counts as the median learner until it has
        answered or missed a pull. Its own ξ_answer keeps a fast learner that hangs from getting the time of a slow
        link. One whose training loop has ended gives its last steps and has no boundary before it: it has the time of
        its own answers, max(deadline_s, min(4 ξ_answer, limit_s))."""
        answer_s = one.answer_s.value
        if one.stopped and answer_s is not None:
            limit_s = deadline_limit_s(self.settings, self.answer_s or 0.0)
            return max(self.deadline_s, min(DEADLINE_RATIO * answer_s, limit_s))
        if answer_s is None:
            answer_s = self.answer_s
        if self.settings.synchronous or one.stopped or self.step_s is None or answer_s is None:
            return self.deadline_s
        step_s = self.step_s if one.step_s.value is None else one.step_s.value
        answer_by_s = min(self.deadline_s, max(self.settings.pull_floor_s, DEADLINE_RATIO * answer_s))
        return max(answer_by_s, min(OWN_STEPS * step_s, max(1, self.settings.overlap) * self.step_s))


def _may_yet_copy(one: KnownLearner, round_: Round) -> bool:
    return one.offer < round_.number and one.aims <= round_.number


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a round closes now, and why."""

    close: bool
    reason: str
    """Shown in the events and on the screen, asserted in tests."""
    until: float | None = None
    """When the answer may change without an event; None: it cannot."""


def count_learners(count: int) -> str:
    return "1 learner" if count == 1 else f"{count} learners"


def lowered_quorum(quorum: int, stepping: int) -> int:
    """After `patience_s` with fewer learners that step: max(1, min(K, stepping))."""
    return max(1, min(quorum, stepping))


def overdue_at(due_at: float, longest_stall_s: float, settings: Settings) -> float:
    """From then on a round takes those that are ready. A second attempt is due from its beginning on."""
    return due_at + max(longest_stall_s, settings.patience_s)


def judge(now: float, *, ready: int, awaited: int, quorum: int, grace_ends: float | None) -> Verdict:
    """Whether a round may freeze its members now. `grace_ends` is None while the round is not due: by its pace, or
    because an earlier round gathers. `awaited`: see `RoundClosing.count_awaited`."""
    if ready < quorum:
        return Verdict(False, f"{ready} of {count_learners(quorum)} reported")
    if grace_ends is None:
        return Verdict(False, "not due yet: by the pace, or an earlier round gathers")
    if ready >= awaited:
        all_of_them = "the only live learner" if awaited == 1 else f"all {awaited} live learners"
        return Verdict(True, f"{all_of_them} reported")
    if now < grace_ends:
        return Verdict(False, f"grace window open for {grace_ends - now:.3f} s", until=grace_ends)
    return Verdict(True, f"grace window over with {ready} of {awaited}")


def judge_all(*, ready: int, missing: int) -> Verdict:
    """The synchronous rule: every learner that was stepping when the round opened and still is."""
    if ready == 0 or missing > 0:
        return Verdict(False, f"{ready} of {count_learners(ready + missing)} reported")
    return Verdict(True, f"{count_learners(ready)} reported, all that were awaited (synchronous)")


@dataclass(slots=True)
class Estimates:
    """Moving averages that the syncer measures in its own rounds."""

    quorum_s: Average = field(default_factory=Average)
    """From the moment a round is due to its quorum."""
    sync_s: Average = field(default_factory=Average)
    """From sending the pulls to the last answer, plus the merge."""

    def pull_deadline_s(self, settings: Settings, answer_s: float | None = None) -> float:
        """max(floor, 4 ξ_sync), at most 4 max(floor, 4 ξ_answer), where `answer_s` is the median learner's ξ_answer.

        ξ_sync follows the slowest member, so a slow link has its time. The upper limit is there because a learner that
        always answers at the deadline would otherwise make the next deadline longer, round after round.
        """
        by_all = max(settings.pull_floor_s, DEADLINE_RATIO * (self.sync_s.value or 0.0))
        if answer_s is None:
            return by_all
        return min(by_all, deadline_limit_s(settings, answer_s))


def deadline_limit_s(settings: Settings, answer_s: float) -> float:
    """4 max(floor, 4 ξ_answer), of the median learner: no learner stretches a deadline further."""
    return DEADLINE_RATIO * max(settings.pull_floor_s, DEADLINE_RATIO * answer_s)


def grace_s(step_s: float | None, estimates: Estimates, settings: Settings) -> float:
    """How long a round waits after its quorum for more learners:

    slack = τ·ξ_step − (ξ_quorum + ξ_sync);   grace = min(1, H/P)·clamp(γ·slack, 0, cap·ξ_step)

    With H below P several rounds belong to one step, and gather one after the other. ξ_step is the median of the live
    learners' averages (`Membership.step_s`); ξ_quorum and ξ_sync are the syncer's own exponential moving averages
    (`Estimates`). Until they exist, a round waits for all stepping learners, for at most `startup_s`.
    """
    quorum_s, sync_s = estimates.quorum_s.value, estimates.sync_s.value
    if step_s is None or quorum_s is None or sync_s is None:
        return settings.startup_s
    slack = settings.overlap * step_s - (quorum_s + sync_s)
    share = min(1.0, schedule.interval(settings))
    return share * max(0.0, min(settings.grace_share * slack, settings.grace_cap_steps * step_s))


APART = 16.0
"""Of the two middle learners (an even number), the faster one counts for at most this many times the steps of the
other. If honest learners differ by more, the run is paced a little more slowly."""


@dataclass(slots=True)
class Pace:
    """The run's step, and the pace of rounds: one round per H/P learner steps, however fast the network is.

    The clock is the median number of steps that the stepping learners have made. It must not jump when learners join or
    leave, so at each such change every learner is placed where the clock stands. A run that fell behind by more than
    one round does not catch up in a burst: that would sync a fragment again long before its H steps.

    The clock is also the run's step, as far as it is believed: it never falls, every round's record holds it, and a
    later term continues from the journal. One learner cannot move it far by claiming steps: with three or more learners
    the median stays among the steps of the others; of two, the faster one counts for at most `APART` times the other.
    When learners join or leave, a learner may be ahead by `APART` times one step of the other. Its own steps use this
    allowance up and each step of another fills it again, so coming and going brings nobody more. Whoever steps alone is
    believed, unless others are to be back: they are away for a moment, join, or are in a long step. Then its steps pace
    the rounds, and the run's step follows at a believed rate (`budget.Alone`): `APART` times the usual of the others,
    or the whole budget in an hour, whichever is more. In a synchronous run the schedule alone sets the step
    (schedule.py).
    """

    interval: float
    """Learner steps from one round to the next: H/P, or more where versions take longer (`RoundInterval`)."""
    carried_s: float = 0.0
    """Seconds from one round to the next that the narrowest link, merge or disk needs; 0: H/P steps are longer."""
    free_at: float = 0.0
    """Moment before which the narrowest part is busy with earlier rounds."""
    clock: float = 0.0
    """What the learners say; it paces the rounds."""
    step: float = 0.0
    """The run's step: as far as that is believed."""
    due: float = 0.0
    """The clock at which the next round may freeze."""
    _anchored_at: float = 0.0
    """The clock when the stepping learners last changed …"""
    _anchors: dict[str, int] = field(default_factory=dict)
    """… and the steps that each of them had made then."""
    _places: dict[str, float] = field(default_factory=dict)
    """Where each learner stands on the clock."""
    _sorted: list[float] = field(default_factory=list)
    """The same places, in order: one of them moves with every report."""
    _ahead: dict[str, float] = field(default_factory=dict)
    """By how many steps of the other each learner may be ahead at the anchor: 0 to 1."""
    _alone: dict[str, Alone] = field(default_factory=dict)
    """The account of each learner that stepped alone while others were to be back."""
    _counted_at: float = 0.0
    """The time up to here is in those accounts."""

    def __post_init__(self) -> None:
        self.due = self.interval

    def set_members(self, steps: dict[str, int], now: float = 0.0) -> None:
        """The stepping learners have changed."""
        if steps.keys() != self._anchors.keys():
            self._settle_steps()
            self._count_time(now)
            self._anchored_at, self._anchors = self.clock, dict(steps)
            # The same order of operations as in move_learner: equal to the bit.
            self._places = {learner: self.clock + t - t for learner, t in steps.items()}
            self._sorted = sorted(self._places.values())

    def move_learner(
        self, learner: str, t: int, now: float = 0.0, believed: Callable[[], float | None] = lambda: None
    ) -> None:
        """`believed`: at which rate steps count that it makes alone; None: all of them do."""
        if learner in self._anchors:
            del self._sorted[bisect_left(self._sorted, self._places[learner])]
            self._places[learner] = self._anchored_at + t - self._anchors[learner]
            insort(self._sorted, self._places[learner])
            before, self.clock = self.clock, max(self.clock, self._middle())
            if len(self._anchors) == 1 or (learner in self._alone and self._alone[learner].steps):
                self._count_alone(learner, self.clock - before, now, believed())
            self.step = max(self.step, self.clock - sum(one.steps - one.counted for one in self._alone.values()))

    def _count_alone(self, learner: str, steps: float, now: float, rate: float | None) -> None:
        """It has made these steps, alone or not, and may have made some alone before."""
        self._count_time(now)
        if rate is None:
            self._alone.pop(learner, None)
            return
        alone = self._alone.setdefault(learner, Alone())
        alone.steps += steps if len(self._anchors) == 1 else 0.0
        alone.count(rate)

    def _count_time(self, now: float) -> None:
        """Up to now one learner stepped alone, if one did."""
        if len(self._anchors) == 1:
            [learner] = self._anchors
            self._alone.setdefault(learner, Alone()).seconds += now - self._counted_at
        self._counted_at = now

    def _settle_steps(self) -> None:
        """What the steps since the last anchor leave of how far each learner may be ahead at the next."""
        made = {learner: place - self._anchored_at for learner, place in self._places.items()}
        in_all = sum(made.values())
        for learner, own in made.items():
            ahead = self._ahead.get(learner, 0.0) + (in_all - own) - own / APART
            self._ahead[learner] = max(0.0, min(1.0, ahead)) if len(made) > 1 else 1.0

    def _middle(self) -> float:
        """The median place. Of two in the middle, the upper one is limited by `APART`."""
        half, odd = divmod(len(self._sorted), 2)
        if odd:
            return self._sorted[half]
        lower, upper = self._sorted[half - 1 : half + 1]
        most = self._anchored_at + APART * (lower - self._anchored_at)
        if upper > most:
            most += APART * max(self._ahead.get(one, 0.0) for one, place in self._places.items() if place == upper)
        return (lower + min(upper, most)) / 2

    def go_on_from(self, step: float) -> None:
        """An earlier term came this far. The next round is due an interval later: none is made up for."""
        self.clock, self.step, self.due = step, step, step + self.interval

    def is_due(self, now: float) -> bool:
        return self.clock >= self.due - 1e-9 and now >= self.free_at

    def use_turn(self, now: float) -> None:
        """Count a round that has used its turn. The clock moves by whole steps, to each of which several rounds may
        belong. After a pause the narrowest part makes up for half a round at most; more would queue."""
        self.free_at = max(self.free_at, now - self.carried_s / 2) + self.carried_s if self.carried_s else now
        self.due = max(self.due + self.interval, self.clock - max(1.0, self.interval))

    def change_interval(self, interval: float) -> None:
        """From the next round on; none is made up for."""
        self.interval, self.due = interval, min(self.due, self.clock + interval)
