"""The end of a run: when it comes, how the last steps are collected, what is said of it.

Rules kept here, each with its test: a run ends when its budget of steps or tokens is spent, when every learner has
stopped, or when the operator asks. First the last steps are collected (`LastCycle`), then a last snapshot is taken
(cuts.py), then the run is finished. Both ends are durable before anybody is told. A term that finds a run ending lets
the learners come back first; one that finds it finished says so once more, unless its first event opens the run again.
The last record of an end says how much of the budget is spent: tokens that came after the last round are in no other
record.
"""

from __future__ import annotations

from math import inf

from atoll.protocol import schedule
from atoll.protocol.messages import Ending, Finish
from atoll.protocol.phases import outer_at_end
from atoll.protocol.records import ChangedRecord, EndedRecord
from atoll.protocol.syncer.effects import Finished
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.peers import Peers
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import SyncerState

EVERYONE_STOPPED = "every learner has stopped"
"""The reason of a run whose scripts ended."""


class RunEnd:
    def __init__(self, state: SyncerState, rounds: Rounds, peers: Peers, assembly: Assembly) -> None:
        self.state, self.rounds, self.peers, self.assembly = state, rounds, peers, assembly
        self.last_cycle = LastCycle(state, rounds)
        self._idle_since = inf
        """The last moment at which somebody made steps, or nobody was there; at first, when this term began."""
        self._was_over = state.phase == "finished"
        """An earlier term came to the end and could not say so to everybody."""

    def advance_end(self, now: float, wakes: list[float]) -> None:
        """Begin to end, or go on with it, where it is time."""
        self._idle_since = min(self._idle_since, now)
        if self.state.phase == "running" and (reason := self._reason_to_end(now, wakes)) is not None:
            self.begin_ending(now, reason)
        if (
            self.state.phase == "ending"
            and self.last_cycle.collect_next(now, wakes)
            and self._took_last_cut(now, wakes)
        ):
            self._finish_run(self.state.end_reason)

    def _took_last_cut(self, now: float, wakes: list[float]) -> bool:
        return self.rounds.cuts.end_with_one(now, self.state.committed, self.state.end_reason, wakes)

    def _reason_to_end(self, now: float, wakes: list[float]) -> str | None:
        """Why the run is to end now, if it is."""
        if not self.assembly.may_end(now, wakes):
            return None
        if self.state.history.ended:
            return self.state.history.ended  # an earlier term had begun to
        if self.rounds.steps_spent():
            return f"{self.state.settings.steps:,} steps are done"
        if self.tokens_spent():
            return f"the budget of {self.state.settings.tokens:,} tokens is spent"
        return EVERYONE_STOPPED if self._everyone_stopped(now, wakes) else None

    def tokens_spent(self) -> bool:
        return 0 < self.state.settings.tokens <= self.state.members.total_tokens()

    def budget_spent(self) -> bool:
        return self.rounds.steps_spent() or self.tokens_spent()

    def note_step(self, now: float) -> None:
        """Somebody makes steps."""
        self._idle_since = now

    def _everyone_stopped(self, now: float, wakes: list[float]) -> bool:
        """Whether all that are connected have stopped, and it is `assemble_s` since then, or as many have stopped as
        the run is meant for and no other has only lost its connection. One that was asked to leave does not count as
        stopped: it may be back, or another in its place."""
        there = self.state.members.connected_learners()
        if not there or not all(one.stopped and not one.leaving for one in there):
            self._idle_since = now
            return False
        wakes.append(self._idle_since + self.state.settings.assemble_s)
        if now >= self._idle_since + self.state.settings.assemble_s:
            return True
        seen = self.state.members.learners.values()
        stopped = sum(one.stopped and not one.leaving for one in seen)  # also those that have left since
        trains = any(not one.stopped and not one.closed for one in seen)  # its line is down, and it may be back
        return stopped >= self.state.settings.learners and not trains

    def begin_ending(self, now: float, reason: str) -> None:
        """Learners are told to stop. A run without parameters has nothing to collect, and is over at once."""
        if self.state.phase == "empty":
            self._finish_run(reason)
        if self.state.phase != "running":
            return
        if not self.state.history.ended:
            self.state.out.persist(EndedRecord(reason, step=self.rounds.step))
        self.state.enter_phase("ending", reason)
        self.state.out.note("ending", f"the run ends: {reason}; the last steps are collected")
        self.last_cycle.begin_cycle(now)
        self.peers.end_all_recoveries("the run ends")
        for learner in self.state.members.connected_learners():
            self.state.out.send(learner.name, Ending(reason=reason))

    def _finish_run(self, reason: str) -> None:
        self.state.out.persist(
            EndedRecord(reason, final=True, step=self.rounds.step, progress=self.rounds.spent_share())
        )
        self.state.enter_phase("finished", reason)
        self.state.out.note("finishing", f"the run is over: {reason}")
        for learner in self.state.members.connected_learners():
            self.state.out.send(learner.name, Finish(reason=reason, versions=tuple(self.state.versions)))
        self.state.out.add_effect(Finished(reason))

    # ---- in a later term ----------------------------------------------------------------------------------------

    def finish_again(self) -> None:
        """Finish again, for a run that an earlier term finished."""
        if self._was_over:
            self._was_over = False
            self.state.out.add_effect(Finished(self.state.end_reason))

    def reopen_run(self) -> None:
        """A run that had ended, or had begun to, goes on; the history says so already."""
        self.state.reopen()
        self.state.members.expect_back(self.state.versions)
        self._was_over = False


class LastCycle:
    """The last cycle: when the learners have stopped, one unpaced cycle of P rounds brings their last steps in.

    Rounds under way are finished first. A fragment of which nobody has steps left is skipped. The outer steps of the
    others do not look ahead (docs/adr/0039). Whoever does not stop, or does not take the version that holds its last
    contribution, is waited for with a patience, anew after every commit. One that was muted or stalled is asked too: a
    training loop that has ended answers at once, however slow its steps were. Nobody is asked twice, so a moment of
    silence leaves nobody out: it takes a missed deadline, which is longer here (`RoundClosing.last_deadline_s`), or a
    link that is given up. Whoever misses it is asked for no more: one that reports and never answers holds up the end
    once, not once a fragment.
    """

    def __init__(self, state: SyncerState, rounds: Rounds) -> None:
        self.state, self.rounds = state, rounds
        self._stop_by = 0.0
        self._moved_at = 0.0
        self._seen = 0
        self._until: int | None = None
        """The round after the cycle's last."""

    def begin_cycle(self, now: float) -> None:
        self.rounds.stop_gathering()
        self._stop_by = now + self._patience_s()

    def collect_next(self, now: float, wakes: list[float]) -> bool:
        """Open what is to be collected next; True when nothing is left."""
        if self.state.committed > self._seen:
            self._seen, self._moved_at = self.state.committed, now
        if self.state.open_rounds or self._waits_for_stops(now, wakes):
            return False
        if self._until is None:
            self._until, self._moved_at = self.state.next_round + self.state.settings.fragments, now
        while self.state.next_round < self._until:
            fragment = schedule.fragment_of(self.state.next_round, self.state.settings)
            if self._waits_for_adoption(now, fragment, wakes):
                return False
            reachable = self.state.members.reachable_learners()
            if any(self.rounds.closing.has_last_steps(one, fragment) for one in reachable):
                self._stop_looking_ahead()
                self.rounds.open_one(now)
                return False
            self.rounds.skip_next()
        return True

    def _stop_looking_ahead(self) -> None:
        """The outer steps of this cycle are followed by none (phases.py). No round is under way when it begins."""
        history = self.state.history
        outer = outer_at_end(history.outer)
        if outer != history.outer:
            self.state.change_settings(ChangedRecord(history.settings, outer, "the last cycle"))

    def _patience_s(self) -> float:
        """Long enough for the slowest learner to come to its next boundary, and for a message to it and its answer. One
        that has stalled is waited for `assemble_s` at most."""
        most_s = self.state.settings.assemble_s
        own_s = [
            min(_needs_s(one), most_s) if one.stalled else _needs_s(one)
            for one in self.state.members.reachable_learners()
        ]
        return max(self.state.settings.patience_s, 4 * (self.state.members.step_s() or 0.0), *own_s)

    def _waits_for_stops(self, now: float, wakes: list[float]) -> bool:
        wakes.append(self._stop_by)
        return now < self._stop_by and any(not one.stopped for one in self.state.members.reachable_learners())

    def _waits_for_adoption(self, now: float, fragment: int, wakes: list[float]) -> bool:
        """Whether a learner has yet to adopt the version with its last contribution: it may not give before. With
        adopt = "carry" it may have steps left then."""
        until = self._moved_at + self._patience_s()
        wakes.append(until)
        return now < until and any(not one.may_give(fragment) for one in self.state.members.reachable_learners())


def _needs_s(one: KnownLearner) -> float:
    """What it takes to tell this learner something, and to hear of it after its next boundary."""
    return 2 * (one.step_s.value or 0.0) + (one.answer_s.value or 0.0)


RETURN_S = 1.5
"""A new term's rounds wait this long for the learners it knows: a living one dials every second."""


class Assembly:
    """Whether the learners are there that a run waits for, before it opens rounds or comes to its end.

    Rules kept here, each with its test: a new term waits for the learners it knows. Before its rounds begin it waits
    for `RETURN_S`: whoever misses a round may drop what it trained on meanwhile. Before the run ends it waits for
    `patience_s`: their last steps are to be collected. A synchronous run begins, and goes on in a new term, when all
    its learners are there, or after `assemble_s` with those that are.
    """

    def __init__(self, state: SyncerState, *, returning: bool) -> None:
        self.state = state
        self.returning = returning
        """The learners of an earlier term are coming back."""
        self._back_by: float | None = None
        """The end of the run waits for them until then."""
        self._started_at = 0.0
        self._opened = False
        """The first round of this term is open."""
        self._everybody = False
        """Those that have left are to come back too."""

    def note_start(self, now: float) -> None:
        """The run has its first parameters."""
        self._started_at = now

    def expect_everybody(self) -> None:
        """A run that had ended goes on: all its learners have left, and a synchronous run waits for all of them."""
        self._everybody = True

    def may_end(self, now: float, wakes: list[float]) -> bool:
        """Whether everybody is back, or has had the time to."""
        if not self.returning:
            return True
        away = [one for one in self.state.members.learners.values() if one.state != "training" and not one.closed]
        self._back_by = self._back_by if self._back_by is not None else now + self.state.settings.patience_s
        self.returning = bool(away) and now < self._back_by
        if self.returning:
            wakes.append(self._back_by)
        return not self.returning

    def may_open(self, now: float, wakes: list[float]) -> bool:
        """Whether rounds may go on."""
        if not self._may_go_on(now, wakes) or not self._may_begin(now, wakes):
            return False
        self._opened = True
        return True

    def _may_go_on(self, now: float, wakes: list[float]) -> bool:
        if not self.returning or self._back_by is None:
            return True
        until = self._back_by - max(0.0, self.state.settings.patience_s - RETURN_S)
        wakes.append(until)
        return now >= until

    def _may_begin(self, now: float, wakes: list[float]) -> bool:
        if not self.state.settings.synchronous or self._opened:
            return True
        self._started_at = self._started_at or now
        live, late_at = self.state.members.live_learners(), self._started_at + self.state.settings.assemble_s
        seen = self.state.members.learners.values()
        known, drained = sum(not one.closed for one in seen), sum(one.closed and one.was_asked_to_leave for one in seen)
        if self._everybody:
            awaited = self.state.settings.learners
        else:
            awaited = self.state.settings.learners - drained if self.state.next_round == 0 else known
        wakes.append(late_at)
        return len(live) >= awaited or (now >= late_at and bool(live))
