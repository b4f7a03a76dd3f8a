"""Rounds, from opening to commit.

The stages of a round: `STAGES` in state.py. A round that loses its quorum gathers once more, and then takes as many
contributions as its first attempt had; after a second failure it is passed over, and its record says why.

Rules kept here, each with its test:
- rounds commit in the order of their numbers, also past a round that is passed over; versions go up by one;
- at most one round of a fragment is under way;
- a member that dies, declines or misses its deadline is left out of the round; so is one that misses 1.5 heartbeats
  once another member has answered, unless these are its last steps;
- a member that misses two pulls is muted until it answers a probe;
- a deadline that everyone missed makes the next one longer, but no single learner can stretch it without limit;
- a learner that takes part in a share of the rounds is asked for each of them so early that its contribution is there
  when the round freezes: rounds commit in order, so waiting for it would make all contributions older.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from operator import gt
from typing import NamedTuple

import msgspec

from atoll.protocol import records, schedule
from atoll.protocol.messages import Announce, Contribution, Member, Pull
from atoll.protocol.settings import MOST_PHASES, Settings
from atoll.protocol.statistics import RecentSamples, Spread
from atoll.protocol.syncer.closing import DEADLINE_RATIO, OWN_STEPS, Deadlines, RoundClosing
from atoll.protocol.syncer.cuts import Cuts
from atoll.protocol.syncer.effects import Commit, ConfirmSent, Judged, Merge, Merged, Part, Send
from atoll.protocol.syncer.interval import RoundInterval
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import Round, Seat, SyncerState
from atoll.protocol.syncer.weights import describe_limited, limit_of, limit_weights, weight

SILENT_BEATS = 1.5
"""Heartbeats after which a member that says nothing is not waited for."""
NOTHING_LEFT = "nobody has steps left of it"
RECENT = 512
"""Samples behind the live figures of effective H and of the overlap."""


class Ahead(NamedTuple):
    """Facts of one look by which learners with a share are asked ahead, the same for all of them."""

    round_s: float
    """Seconds from one round to the next."""
    first: int
    """Number of the round that gathers now, or will next."""
    last_free: int
    """Number of the last round whose fragment no earlier round takes."""
    busy: frozenset[int]
    """Fragments of the rounds that gather or are under way."""


class Rounds:
    def __init__(self, state: SyncerState, cuts: Cuts) -> None:
        self.state, self.cuts = state, cuts
        self.closing = RoundClosing(state)
        self.closing.pace.go_on_from(state.history.step)
        self.interval = RoundInterval(state)
        self.last_members: tuple[str, ...] = ()
        self.last_reason = ""
        self.last_weights: dict[str, float] = {}
        self._steps_between_syncs = RecentSamples(RECENT)
        self._overlaps = RecentSamples(RECENT)
        self._asked_h = state.settings.sync_every
        self.earlier_h: deque[tuple[int, float | None]] = deque(maxlen=MOST_PHASES)
        """For each earlier H of this term: the H asked for, and the effective H that was last measured under it."""

    @property
    def steps_between_syncs(self) -> Spread:
        """Learner steps between two syncs of a fragment, in the last `RECENT` samples."""
        return self._steps_between_syncs.spread

    @property
    def overlap(self) -> Spread:
        """Learner steps from reading a contribution to adopting the version that holds it, in the last `RECENT`
        samples."""
        return self._overlaps.spread

    def note_adoptions(self, learner: KnownLearner, versions: Sequence[int], t: int) -> None:
        """It reports these versions at its step t: measure the overlap of those that hold its last contributions."""
        if learner.versions == versions or not learner.versions:
            return
        for fragment, version in enumerate(versions):
            held = learner.versions[fragment] < learner.merged[fragment] <= version
            if held and fragment in learner.synced_t:
                learner.overlaps[fragment] = steps = t - learner.synced_t[fragment]
                self._overlaps.add(steps)

    @property
    def step(self) -> float:
        """The run's step, as of now (`Pace`)."""
        return self.closing.pace.step

    @property
    def global_step(self) -> int:
        return int(self.step)

    def any_becomes_due(self, now: float) -> bool:
        """Whether the round whose turn it is has yet to be told that it is due."""
        gathering = [round_ for round_ in self.state.open_rounds.values() if round_.stage == "gathering"]
        return self.closing.pace.is_due(now) and bool(gathering) and gathering[0].due_at is None

    def follow_settings(self) -> None:
        """H, τ or adoption are others: nothing is measured under them yet."""
        self.earlier_h.append((self._asked_h, self.steps_between_syncs.median))
        self._asked_h = self.state.settings.sync_every
        self._steps_between_syncs, self._overlaps = RecentSamples(RECENT), RecentSamples(RECENT)
        self.interval.start_anew()
        self.closing.pace.change_interval(self.interval.asked_steps)

    def _follow_interval(self, now: float, round_: Round) -> None:
        """Space rounds by what links, merge and disk carry. The overlap is that of the last two cycles: the first
        versions of a run often take longer."""
        two_cycles = 2 * self.state.settings.fragments * len(self.state.members.stepping_learners())
        self.interval.note_commit(now, round_, self._overlaps.spread_of(two_cycles).p95)
        self.closing.pace.interval, self.closing.pace.carried_s = self.interval.asked_steps, self.interval.carried_s

    # ---- opening and gathering ----------------------------------------------------------------------------------

    def advance_rounds(self, now: float, wakes: list[float]) -> bool:
        """Advance one round; returns whether one moved. The next decision is made after a look at who is there by then:
        a failed round may have muted a learner that another round's quorum counted."""
        for round_ in list(self.state.open_rounds.values()):  # rounds are opened by number
            if round_.stage == "gathering":
                if self._close_if_ready(now, round_, wakes):
                    return True
            elif round_.stage == "pulling":
                if self._collect_answers(now, round_, wakes):
                    return True
            elif round_.stage == "void" and round_.number == self.state.committed:
                self._pass_over(round_, round_.reason)
                return True
        return False

    def open_next(self, now: float) -> None:
        """The next round gathers while the others transfer."""
        spent = self.steps_spent(self.state.next_round - self.state.committed)
        if not spent and not any(r.stage == "gathering" and r.attempt == 1 for r in self.state.open_rounds.values()):
            self.open_one(now)

    def open_one(self, now: float) -> None:
        number = self.state.next_round
        fragment = schedule.fragment_of(number, self.state.settings)
        ahead = self.state.open_rounds.pop(number, None)
        if any(round_.fragment == fragment for round_ in self.state.open_rounds.values()):
            assert ahead is None, "a learner is asked ahead only for the next round of a fragment"
            return
        roster = frozenset(learner.name for learner in self.state.members.stepping_learners())
        round_ = Round(number, fragment, now, roster, self.state.draining)
        if ahead is not None:
            round_.take_seats_of(ahead)
        self.state.open_rounds[number] = round_
        self.state.next_round += 1

    # ---- learners with a share of the rounds ---------------------------------------------------------------------

    def pull_ahead(self, now: float) -> None:
        """Ask every learner with a share for its next contribution, in time for the round to freeze with it. Asking
        earlier would only make the contribution older."""
        if self.state.settings.synchronous or self.state.draining or self.state.changing_rounds:
            return
        narrow = [learner for learner in self.state.members.stepping_learners() if learner.share < 1.0]
        if not narrow or (ahead := self._look_ahead()) is None:
            return
        deadlines = self.closing.deadlines
        for learner in narrow:
            if (number := self._next_turn(learner, ahead)) is not None:
                self._ask_ahead(now, learner, number, deadlines)

    def has_turn_ahead(self, learner: KnownLearner) -> bool:
        """Whether this learner with a share could be asked for a contribution now."""
        if learner.share == 1.0 or not learner.live or learner.stopped or (ahead := self._look_ahead()) is None:
            return False
        return self._next_turn(learner, ahead) is not None

    def _look_ahead(self) -> Ahead | None:
        """None: the learners' step times are not known yet."""
        if not (step_s := self.state.members.step_s()):
            return None
        first, rounds = self.state.gathering_round, self.state.open_rounds.values()
        last_free = first + self.state.settings.fragments - 1 - sum(round_.is_under_way for round_ in rounds)
        busy = frozenset(round_.fragment for round_ in rounds if round_.stage != "ahead")
        return Ahead(self.interval.steps * step_s, first, last_free, busy)

    def _count_asked(self, learner: KnownLearner) -> int:
        """Count the answers of this learner that are on their way."""
        seats = (round_.seats.get(learner.name) for round_ in self.state.open_rounds.values())
        return sum(seat is not None and seat.state == "asked" for seat in seats)

    def _count_owed(self, learner: KnownLearner) -> int:
        """Count the versions that hold contributions of this learner and that it has not adopted."""
        return sum(map(gt, learner.merged, learner.versions))

    def _next_turn(self, learner: KnownLearner, ahead: Ahead) -> int | None:
        """Return the next round in which the learner has a turn and for which its contribution would be just in time.
        None: there is no such round, or as many of its answers are on their way as rounds begin in the time of one
        answer; more would only queue."""
        settings = self.state.settings
        lead = ceil(self.interval.lead_s(learner) / ahead.round_s)
        if self._count_asked(learner) >= max(1, lead):
            return None
        if self._count_owed(learner) > self.interval.most_owed(learner, ahead.round_s):
            return None  # its way down has a queue
        # If the answer takes longer than a cycle, the learner is asked as early as a fragment is free. The answer comes
        # late then and its round waits for it, but otherwise the learner would never be asked.
        soonest = max(min(ahead.first + lead, ahead.last_free), self.state.next_round)
        for number in range(soonest, min(soonest + 2, ahead.first + settings.fragments)):
            fragment = schedule.fragment_of(number, settings)
            round_ = self.state.open_rounds.get(number)
            free = fragment not in ahead.busy and (round_ is None or learner.name not in round_.seats)
            if free and schedule.has_turn(number, learner.share, settings) and learner.is_ready(fragment):
                return number
        return None

    def _ask_ahead(self, now: float, learner: KnownLearner, number: int, deadlines: Deadlines) -> None:
        fragment = schedule.fragment_of(number, self.state.settings)
        ahead = self.state.open_rounds.get(number)
        if ahead is None:
            ahead = self.state.open_rounds[number] = Round(number, fragment, now, stage="ahead")
        deadline_s = max(deadlines.of(learner), DEADLINE_RATIO * self.interval.lead_s(learner))
        ahead.add_seat(Seat(learner.name, learner.incarnation, learner.t, deadline_s, asked_at=now))
        gathering = self.state.gathering_round
        pull = Pull(round=number, attempt=1, fragment=fragment, gathering=gathering, deadline_s=deadline_s)
        self.state.out.send(learner.name, pull)

    def _void_ahead(self, reason: str) -> None:
        """Void every round up to the last one that a learner was asked for ahead. If a number were used again, a late
        answer would be taken for the answer to another pull."""
        rounds = self.state.open_rounds.values()
        last = max((round_.number for round_ in rounds if round_.stage == "ahead"), default=-1)
        for number in range(self.state.next_round, last + 1):
            fragment = schedule.fragment_of(number, self.state.settings)
            round_ = self.state.open_rounds.setdefault(number, Round(number, fragment, 0.0, stage="ahead"))
            round_.enter_stage("void")
            round_.reason = reason
            for seat in round_.seats.values():
                self.leave_out(round_, seat, reason)
        self.state.next_round = max(self.state.next_round, last + 1)
        self.state.open_rounds = dict(sorted(self.state.open_rounds.items()))

    def skip_next(self) -> None:
        """The next round of the last cycle has nothing to collect."""
        fragment = schedule.fragment_of(self.state.next_round, self.state.settings)
        passed = records.PassedRecord(self.state.next_round, fragment, NOTHING_LEFT, self.spent_share(), self.step)
        self.state.out.persist(passed)
        self.state.next_round += 1
        self._count_round()

    def stop_gathering(self) -> None:
        """The run ends: rounds under way are finished, those that only gather are not."""
        self._void_ahead("the run ends")
        # One that was pulled once is passed over and not opened anew: a late answer to that first pull would be taken
        # for the last steps.
        rounds = self.state.open_rounds.values()
        under_way = max((r.number for r in rounds if r.stage != "gathering" or r.attempt > 1 or r.seats), default=-1)
        for round_ in [r for r in self.state.open_rounds.values() if r.stage == "gathering"]:
            if round_.number > under_way:
                del self.state.open_rounds[round_.number]
            else:
                round_.enter_stage("void")
                round_.reason = "the run ends"
                for seat in round_.seats.values():  # seats of learners that were asked ahead
                    self.leave_out(round_, seat, "the run ends")
        self.state.next_round = max(self.state.open_rounds, default=self.state.committed - 1) + 1
        self.state.draining = True
        self.state.gave_no_answer.clear()

    def _close_if_ready(self, now: float, round_: Round, wakes: list[float]) -> bool:
        if self.closing.is_behind_all(round_):
            self._pass_over(round_, "every learner has gone past it")
            return True
        if self.closing.is_skipped(round_):
            self._pass_over(round_, NOTHING_LEFT)
            return True
        in_turn = not any(r.number < round_.number and r.stage == "gathering" for r in self.state.open_rounds.values())
        self.closing.note_overdue(now, round_)
        ready = self.closing.ready_learners(round_)
        verdict = self.closing.judge_round(now, round_, ready, in_turn=in_turn, wakes=wakes)
        if not verdict.close:
            if verdict.until is not None:
                wakes.append(verdict.until)
            return False
        if round_.attempt == 1 and self._must_wait(round_):
            return False
        self._freeze_members(now, round_, ready, verdict.reason)
        return True

    def _must_wait(self, round_: Round) -> bool:
        """A first attempt waits for a change of H, τ or adoption, and for a free flight. A second one must not: rounds
        behind it may be frozen already, and commit only after it. The change and the flight wait for these."""
        if not self.state.draining and (self.state.changing_rounds or self._is_of_later_phase(round_)):
            return True
        under_way = sum(other.is_under_way for other in self.state.open_rounds.values())
        return under_way >= self.interval.allowed

    def _is_of_later_phase(self, round_: Round) -> bool:
        """Synchronous: learners have copied it for a phase that begins once the rounds before are committed."""
        settings = self.state.settings
        if not settings.synchronous or not settings.phases:
            return False
        return schedule.span_of(round_.number, settings).number > self.state.history.training_phase

    def _freeze_members(self, now: float, round_: Round, ready: list[KnownLearner], reason: str) -> None:
        self.closing.note_frozen(now, round_)
        round_.enter_stage("pulling")
        round_.frozen_at, round_.reason = now, reason
        alive = self.state.members.names_alive(heard_since=now - SILENT_BEATS * self.state.settings.heartbeat_s)
        without_turn = {learner.name for learner in self.closing.without_turn(round_)}
        round_.alive = len((set(alive) - without_turn) | {learner.name for learner in ready})
        deadlines, last_s = self.closing.deadlines, self.closing.last_deadline_s
        for seat in round_.asked:  # asked ahead, and late: from now on the round waits for the answer
            seat.deadline_s = deadlines.of(self.state.members.learners[seat.learner])
        for learner in [learner for learner in ready if not round_.has_seat(learner.name)]:
            deadline_s = last_s if round_.last else deadlines.of(learner)
            round_.add_seat(Seat(learner.name, learner.incarnation, learner.t, deadline_s, asked_at=now))
            pull = Pull(
                round=round_.number,
                attempt=round_.attempt,
                fragment=round_.fragment,
                gathering=max(round_.number + 1, self.state.gathering_round),
                deadline_s=deadline_s,
            )
            self.state.out.send(learner.name, pull)
        self.state.out.add_effect(ConfirmSent(round_.number, round_.attempt))

    def pulls_sent(self, now: float, number: int, attempt: int) -> None:
        """The pulls have left, perhaps after a wait for the disk: deadlines begin now."""
        round_ = self.state.open_rounds.get(number)
        if round_ is not None and round_.stage == "pulling" and round_.attempt == attempt:
            for seat in round_.asked:
                seat.deadline = now + seat.deadline_s
                if seat.asked_at >= round_.frozen_at:  # else it was asked ahead
                    seat.asked_at = now
            round_.frozen_at = now

    # ---- answers ------------------------------------------------------------------------------------------------

    def find_seat(self, learner: KnownLearner, number: int, attempt: int) -> Seat | None:
        """The seat an answer belongs to, if it is still waited for."""
        round_ = self.state.open_rounds.get(number)
        seat = round_.seats.get(learner.name) if round_ else None
        if round_ is None or seat is None or seat.state != "asked" or round_.attempt != attempt:
            return None
        return seat if seat.incarnation == learner.incarnation else None

    def has_given(self, learner: KnownLearner, number: int, attempt: int) -> bool:
        """Whether its contribution to this attempt is in, and waits to be merged."""
        round_ = self.state.open_rounds.get(number)
        seat = round_.seats.get(learner.name) if round_ is not None and round_.attempt == attempt else None
        return seat is not None and seat.state == "given"

    def leave_out(self, round_: Round, seat: Seat, reason: str) -> None:
        round_.leave_out(seat, reason)
        self.state.out.discard(seat.learner, round_.number, round_.attempt)

    def note_nothing_to_give(self, round_: Round, seat: Seat, reason: str) -> None:
        """It has nothing to give: it is asked again after its next step, not before."""
        self.state.members.learners[seat.learner].declined[round_.fragment] = seat.t
        self.leave_out(round_, seat, reason)

    def leave_learner_out(self, learner: KnownLearner, reason: str) -> None:
        """Nothing more will come from this learner to the rounds that asked it."""
        for round_ in self.state.open_rounds.values():
            seat = round_.seats.get(learner.name)
            if seat is not None and seat.state == "asked":
                self.leave_out(round_, seat, reason)

    def under_way(self, learner: KnownLearner) -> Contribution | None:
        """Its newest contribution to a round that is not committed yet."""
        seats = [
            round_.seats[learner.name] for round_ in self.state.open_rounds.values() if learner.name in round_.seats
        ]
        given = [s.answer for s in seats if s.state == "given" and s.incarnation == learner.incarnation]
        return max(given, key=lambda one: one.t, default=None)

    def _collect_answers(self, now: float, round_: Round, wakes: list[float]) -> bool:
        """Wait for the members' answers; merge once it is this round's turn."""
        silent = bool(round_.given) and self._leave_out_silent(now, round_, wakes)
        missed = [seat for seat in round_.asked if now >= seat.deadline]
        for seat in missed:  # for all we know the deadline was too short: learn from it
            learner = self.state.members.learners[seat.learner]
            learner.answer_s.add(now - seat.asked_at)
            self.state.members.update_medians(learner)
        if missed and not round_.given and len(missed) == len(round_.asked):
            self.closing.estimates.sync_s.add(now - round_.frozen_at)
        for seat in missed:
            self._note_miss(now, round_, seat, "missed its deadline", strike=self._had_its_time(now, round_, seat))
        if round_.asked:
            wakes.append(min(seat.deadline for seat in round_.asked))
            return silent or bool(missed)
        least = self._least_contributions(round_)
        if len(round_.given) < least:
            reasons = "; ".join(f"{seat.learner}: {seat.why_out}" for seat in round_.seats.values() if seat.why_out)
            self.fail_round(now, round_, f"{len(round_.given)} of {least} contributions came ({reasons})")
            return True
        if round_.number == self.state.committed:
            round_.enter_stage("merging")
            round_.merging_at = now
            self._weigh_contributions(round_)
            answers = {seat.learner: seat.answer for seat in round_.given}
            parts = tuple(
                Part(name, round_.attempt, weight, answers[name].base, answers[name].steps)
                for name, weight in round_.weights.items()
            )
            self.state.out.add_effect(Merge(round_.number, round_.fragment, parts))
        return silent or bool(missed)  # run another pass, so that a learner just muted is probed now

    def watches_all(self) -> bool:
        """Whether the next look comes in time for each member that falls silent."""
        rounds = self.state.open_rounds.values()
        return not any(round_.stage == "pulling" and round_.answered and not round_.watched for round_ in rounds)

    def _least_contributions(self, round_: Round) -> int:
        """As many as the quorum, or as were asked. A second attempt takes as many as gave to the first: otherwise one
        learner that is always ready and never gives would let no round be merged."""
        if self.state.draining:
            return 1
        gave = len(round_.seats) if round_.gave_before is None else round_.gave_before
        return max(1, min(self.state.settings.quorum, len(round_.seats), gave))

    def _weigh_contributions(self, round_: Round) -> None:
        names = [seat.learner for seat in round_.given]
        claimed = [weight(seat.answer) for seat in round_.given]
        seen = [self.state.members.learners[name].usual.steps for name in names]
        limits = [limit_of(name, steps, self.state.settings) for name, steps in zip(names, seen, strict=True)]
        merged = limit_weights(claimed, limits)
        round_.weights, round_.limits = dict(zip(names, merged, strict=True)), dict(zip(names, limits, strict=True))
        if text := describe_limited(names, claimed, merged):
            round_.reason = f"{round_.reason}; {text}"

    def _leave_out_silent(self, now: float, round_: Round, wakes: list[float]) -> bool:
        """A member on a slow link still sends heartbeats; one that sends nothing is not waited for. Members that give
        their last steps are: they are asked only once, and on an uneven link heartbeats may come further apart."""
        found, round_.watched = False, True
        for seat in round_.asked:
            learner = self.state.members.learners[seat.learner]
            if self.state.draining or learner.stopped:
                continue
            silent_at = max(round_.frozen_at, learner.last_heard) + SILENT_BEATS * self.state.settings.heartbeat_s
            if now >= silent_at:
                self._note_miss(now, round_, seat, "says nothing any more", strike=True)
                found = True
            elif silent_at < seat.deadline:
                wakes.append(silent_at)
        return found

    def _note_miss(self, now: float, round_: Round, seat: Seat, why: str, *, strike: bool) -> None:
        self.leave_out(round_, seat, why)
        if round_.last:
            self.state.gave_no_answer.add(seat.learner)
        learner = self.state.members.learners[seat.learner]
        if learner.incarnation != seat.incarnation or not learner.connected or not strike:
            return
        learner.misses += 1
        learner.missed_at = now
        if learner.misses >= 2 and not learner.muted:
            learner.muted = True
            self.state.members.update_medians(learner)
            paused = "a pause in its training loop, as of validation or a checkpoint?"
            text = f"{learner.name} is connected but gave nothing to {learner.misses} rounds that asked it ({paused})"
            text += "; rounds go on without it until it answers again"
            self.state.out.note("muted", text, learner)

    def _had_its_time(self, now: float, round_: Round, seat: Seat) -> bool:
        """Whether it surely came to a boundary since it was asked: a slow step is no silence."""
        learner = self.state.members.learners[seat.learner]
        if self.state.settings.synchronous or learner.stopped or learner.t > seat.t + 1:
            return True
        own_s = OWN_STEPS * (learner.step_s.value or 0.0)
        return now >= round_.frozen_at + max(seat.deadline_s, own_s)

    # ---- the outcome --------------------------------------------------------------------------------------------

    def fail_round(self, now: float, round_: Round, reason: str) -> None:
        for seat in round_.seats.values():
            self.state.out.discard(seat.learner, round_.number, round_.attempt)
        if round_.attempt == 1 and not self.state.draining:
            self.state.out.note(
                "again", f"round {round_.number} gathers once more: {reason}", round=round_.number, reason=reason
            )
            round_.gather_again(now)
        else:
            self._pass_over(round_, reason)

    def abandon_rounds(self, reason: str) -> None:
        """Nothing comes of the rounds under way: what was given to them is dropped."""
        self._void_ahead(reason)
        for _, round_ in sorted(self.state.open_rounds.items()):
            assert round_.stage != "merging", "what is being merged is committed first"
            for seat in round_.seats.values():
                self.state.out.discard(seat.learner, round_.number, round_.attempt)
            self._pass_over(round_, reason)

    def announce_restored(self, versions: Sequence[int], digests: Sequence[str]) -> None:
        """Announce the versions that a rollback made."""
        self.state.versions = list(versions)
        for fragment, digest in enumerate(digests):
            last = Round(self.state.committed - 1, fragment, 0.0)
            self._announce_version(last, (), digest, restored=True)

    def _pass_over(self, round_: Round, reason: str) -> None:
        """Journaled as empty: only the round count changes. A round is passed in its turn, so order holds."""
        if round_.stage != "void":
            round_.enter_stage("void")
        round_.reason = reason
        if round_.number != self.state.committed:
            return
        del self.state.open_rounds[round_.number]
        self._count_round()
        self.state.out.persist(
            records.PassedRecord(round_.number, round_.fragment, reason, self.spent_share(), self.step)
        )
        text = f"round {round_.number} is passed over: {reason}"
        self.state.out.note("passed", text, round=round_.number, fragment=round_.fragment, reason=reason)
        self._announce_version(round_, ())

    def commit_round(self, now: float, event: Merged) -> None:
        round_ = self.state.open_rounds.pop(event.round)
        assert round_.number == self.state.committed, "rounds commit in order"
        self._count_round()
        self.state.versions[round_.fragment] += 1
        self.state.out.persist(self._record(round_, event), round=round_.number)
        self.state.out.add_effect(Commit(round_.number, round_.fragment, self.state.versions[round_.fragment]))
        self.closing.estimates.sync_s.add(max(0.0, round_.answered_at - round_.frozen_at) + event.merge_s)
        self._follow_interval(now, round_)
        if not self.state.draining:  # a run that ends takes one behind its last round
            self.cuts.take_if_due(now, self.state.committed)
        self._note_commit(now, round_, event)
        members = tuple(
            Member(seat.learner, seat.incarnation, seat.answer.t, seat.answer.tokens) for seat in round_.given
        )
        self._announce_version(round_, members, event.digest)
        for seat in round_.given:
            self.state.out.discard(seat.learner, round_.number, round_.attempt)

    def _record(self, round_: Round, event: Merged) -> records.MergedRecord:
        version = self.state.versions[round_.fragment]
        judged = {one.learner: one for one in event.judged}
        shares = tuple(_share(round_, seat, judged.get(seat.learner)) for seat in round_.given)
        return records.MergedRecord(
            round_.number,
            round_.fragment,
            version,
            round_.attempt,
            round_.reason,
            shares,
            event.digest,
            progress=self.spent_share(),
            marks=event.marks,
            step=self.step,
            heads=event.heads,
            groups=event.groups,
        )

    def _count_round(self) -> None:
        self.state.committed += 1
        self.closing.count_round()
        self.state.out.count_rounds(self.state.committed)

    def _note_commit(self, now: float, round_: Round, event: Merged) -> None:
        version, judged = self.state.versions[round_.fragment], {one.learner: one for one in event.judged}
        members = tuple(self._book_member(round_, seat, version, judged.get(seat.learner)) for seat in round_.given)
        self.last_members = tuple(seat.learner for seat in round_.given)
        self.last_reason, self.last_weights = round_.reason, round_.weights
        self.state.out.note(
            "round",
            f"round {round_.number}: fragment {round_.fragment} is version {version}; {round_.reason}",
            round=round_.number,
            fragment=round_.fragment,
            version=version,
            attempt=round_.attempt,
            reason=round_.reason,
            live=round_.alive,
            members=members,
            gather_s=round(round_.frozen_at - round_.opened_at, 4),
            sync_s=round(now - round_.frozen_at, 4),
            merge_s=round(event.merge_s, 6),
            grace_s=round(round_.grace_s, 4),
            effective_h=self.steps_between_syncs.median,
            step=round(self.step, 3),
        )
        lives = {seat.learner: seat.incarnation for seat in round_.given}
        for one in event.judged:
            learner = self.state.members.learners[one.learner]
            if learner.incarnation == lives.get(one.learner):  # else it is the contribution of a life that has ended
                self._note_suspect(learner, one)

    def _note_suspect(self, learner: KnownLearner, judged: Judged) -> None:
        """Note when a learner becomes suspect, and when it no longer is."""
        learner.agreement, learner.influence = judged.agreement, judged.influence
        before, learner.suspect = learner.suspect, judged.suspect
        if bool(before) == bool(judged.suspect):
            return
        if judged.suspect:
            text = f"{learner.name} is suspect: {judged.suspect}; {self._advise_on_suspects()}"
        else:
            text = f"{learner.name} is not suspect any more"
        self.state.out.note("suspect", text, learner, over=not judged.suspect, agreement=round(judged.agreement, 4))

    def _advise_on_suspects(self) -> str:
        """Say what becomes of a suspect's contributions, and name `robust` only where it leaves out the few."""
        if self.state.history.outer.get("robust", False):
            return "its contributions are left out"
        connected = [one for one in self.state.members.connected_learners() if one.live]
        suspects = sum(bool(one.suspect) for one in connected)
        if 2 * suspects >= len(connected):
            return f"{suspects} of {len(connected)} learners are: compare their data, batches and learning rates"
        return "`atoll set RUN robust=true` leaves such ones out"

    def _book_member(self, round_: Round, seat: Seat, version: int, judged: Judged | None) -> dict[str, object]:
        """Book a member's contribution and tell about it."""
        given, learner = seat.answer, self.state.members.learners[seat.learner]
        since: int | None = None
        if learner.incarnation == seat.incarnation:
            before = learner.synced_t.get(round_.fragment)
            since = None if before is None else given.t - before
            learner.merged[round_.fragment], learner.synced_t[round_.fragment] = version, given.t
            learner.merged_tokens[round_.fragment] = given.tokens
        if since is not None and not self.state.draining:
            self._steps_between_syncs.add(since)
        return {
            "learner": seat.learner,
            "incarnation": seat.incarnation,
            "t": given.t,
            "steps": given.steps,
            "tokens": given.tokens,
            "weight": round_.weights[seat.learner],
            "base": given.base,
            "since": since,
            "overlap": learner.overlaps.pop(round_.fragment, None) if since is not None else None,
            **self._last_report(learner, seat.incarnation),
            "agreement": None if judged is None else round(judged.agreement, 4),
            "influence": None if judged is None else round(judged.influence, 4),
            "filtered": _filtered_tokens(given.tokens, judged),
        }

    def _last_report(self, learner: KnownLearner, incarnation: int) -> dict[str, object]:
        """Its last report. Reports are in no record, so the event log keeps it if all processes die."""
        if learner.incarnation != incarnation:
            return {"loss": None}
        return {"loss": learner.loss, "total": learner.tokens_total, "busy_s": learner.busy_s}

    def _announce_version(
        self, round_: Round, members: tuple[Member, ...], digest: str = "", *, restored: bool = False
    ) -> None:
        """Announce it to every learner: to a member with its own entry, to all others in the same message."""
        announce = Announce(
            round=round_.number,
            fragment=round_.fragment,
            version=self.state.versions[round_.fragment],
            members=members[:1],
            gathering=self.state.gathering_round,
            digest=digest,
            progress=self.state.history.schedule_progress,
            global_step=self.state.history.global_step,
            cuts=self.state.history.kept_cuts,
            restored=restored,
        )
        announce, own = self.state.out.stamp(announce), {member.learner: member for member in members}
        for learner in self.state.members.connected_learners():
            member = own.get(learner.name)
            message = announce if member is None else msgspec.structs.replace(announce, members=(member,))
            self.state.out.add_effect(Send(learner.name, message))

    def steps_spent(self, under_way: int = 0) -> bool:
        """Whether the budget of steps is spent, or (synchronous) will be with so many rounds that are under way."""
        ahead = self.state.settings.synchronous and under_way > 0
        step = schedule.step_after(self.step, under_way, self.state.settings) if ahead else self.step
        return 0 < self.state.settings.steps <= step

    def spent_share(self, settings: Settings | None = None) -> float:
        """How much of the run's budget is spent, in [0, 1]; or of the budget in other settings."""
        settings = settings or self.state.settings
        by_steps = self.step / settings.steps if settings.steps else 0.0
        by_tokens = self.state.members.total_tokens() / settings.tokens if settings.tokens else 0.0
        return min(1.0, max(by_steps, by_tokens))


def _filtered_tokens(tokens: int, judged: Judged | None) -> int:
    return 0 if judged is None else min(tokens, round(tokens * (1.0 - judged.kept)))


def _share(round_: Round, seat: Seat, judged: Judged | None) -> records.Share:
    given = seat.answer
    return records.Share(
        learner=seat.learner,
        incarnation=seat.incarnation,
        t=given.t,
        steps=given.steps,
        tokens=given.tokens,
        weight=round_.weights[seat.learner],
        base=given.base,
        total=given.total,
        position=given.position,
        limit=round_.limits[seat.learner],
        factors=b"" if judged is None else judged.factors,
        filtered=_filtered_tokens(given.tokens, judged),
    )
