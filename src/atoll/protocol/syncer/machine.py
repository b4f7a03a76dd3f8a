"""The syncer's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

This file routes every event to its rule and then lets time do its work. The rules, each with its test, are in:

    the state of a run             state.py; what is written down and sent, in order: outbox.py
    who takes part                 membership.py; who joins and leaves, how a run begins: joining.py; when its training
                                   begins: beginning.py, downloads.py
    who is silent, stalled, muted  liveness.py
    who helps a newcomer           peers.py
    reports and contributions      contributions.py; what a learner may claim: claims.py, budget.py; data and ledger:
                                   accounts.py
    rounds                         rounds.py; when one closes: closing.py; what a contribution weighs: weights.py
    how far apart rounds are       interval.py
    snapshots                      cuts.py
    scores and rollbacks           rollback.py
    the end                        ending.py

Most messages of many learners change nothing yet: a heartbeat, a step before a round is due, an answer before the last.
They skip the second part (`_is_quiet`), whose cost grows with the number of learners.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from atoll.protocol import messages as msg
from atoll.protocol import schedule
from atoll.protocol.effects import Tick
from atoll.protocol.history import History
from atoll.protocol.phases import due_phase, outer_again, outer_in
from atoll.protocol.records import BegunRecord, ChangedRecord, ResetRecord
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import Spread
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.accounts import Accounts
from atoll.protocol.syncer.beginning import Beginning
from atoll.protocol.syncer.closing import Estimates
from atoll.protocol.syncer.contributions import Contributions, Strikes
from atoll.protocol.syncer.cuts import Cuts
from atoll.protocol.syncer.ending import Assembly, RunEnd
from atoll.protocol.syncer.joining import Joining, RunStart
from atoll.protocol.syncer.liveness import Liveness
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.peers import Peers
from atoll.protocol.syncer.rollback import Rollback
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import Round, RunPhase, SyncerState


class Syncer:
    def __init__(self, history: History) -> None:
        """Of a run that has just begun, or of one that an earlier term left behind."""
        assert history.settings.fragments > 0 and history.settings.sync_every > 0, "settings must be resolved"
        self.wake_at: float | None = None
        self._asked: fx.ChangeAsked | None = None
        """A change of settings that waits for a merge, or for the rounds under way."""
        self._only_counted = False
        """The report just taken in closes no round."""
        self.state = state = SyncerState(history)
        self.run, self.history, self.members = history.run, history, state.members
        self.accounts = Accounts(state)
        self.cuts = Cuts(state)
        self.rounds = rounds = Rounds(state, self.cuts)
        self.peers = Peers(state)
        self.assembly = Assembly(state, returning=bool(history.lives))
        self.beginning = Beginning(state, self.assembly)
        self.liveness = Liveness(state, rounds, self.beginning)
        self.run_start = RunStart(state, self.cuts, self.beginning)
        self.joining = Joining(state, self.accounts, rounds, self.peers, self.run_start, self.beginning)
        self.strikes = Strikes(state, self.accounts, rounds, self.peers, self.joining)
        self.contributions = Contributions(
            state, self.accounts, rounds, self.liveness, self.peers, self.joining, self.strikes
        )
        self.rollback = Rollback(state, rounds, self.strikes)
        self.end = RunEnd(state, rounds, self.peers, self.assembly)

    @classmethod
    def fresh(cls, settings: Settings, *, run: str, fingerprint: str) -> Syncer:
        return cls(History(BegunRecord(run, settings, {}, (), fingerprint)))

    # ---- read by the service ----------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self.state.settings

    @property
    def phase(self) -> RunPhase:
        return self.state.phase

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]."""
        return self.rounds.spent_share()

    @property
    def versions(self) -> list[int]:
        return self.state.versions

    @property
    def committed(self) -> int:
        return self.state.committed

    @property
    def next_round(self) -> int:
        return self.state.next_round

    @property
    def global_step(self) -> int:
        return self.rounds.global_step

    @property
    def steps_between_syncs(self) -> Spread:
        """Effective H: median, mean and 95th percentile, of late."""
        return self.rounds.steps_between_syncs

    @property
    def overlap(self) -> Spread:
        """Learner steps from reading a contribution to adopting the version that holds it, of late."""
        return self.rounds.overlap

    @property
    def estimates(self) -> Estimates:
        return self.rounds.closing.estimates

    @property
    def grace_s(self) -> float:
        return self.rounds.closing.grace_s

    @property
    def last_members(self) -> tuple[str, ...]:
        return self.rounds.last_members

    @property
    def last_reason(self) -> str:
        return self.rounds.last_reason

    @property
    def next_settings(self) -> History | fx.ChangeAsked:
        """What holds once a change that was asked for is made: the next one begins with it."""
        return self._asked or self.history

    # ---- what happens -----------------------------------------------------------------------------------------

    def handle(self, now: float, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        self._route_event(now, event)
        if not self._is_quiet(now, event):
            self._advance_all(now)
        self._only_counted = False
        # Last: the first event of a term may be the change that opens a finished run again.
        self.end.finish_again()
        return self.state.out.take_effects()

    def _route_event(self, now: float, event: fx.SyncerEvent) -> None:
        match event:
            case fx.Greeted(hello, token):
                self.joining.greet_learner(now, hello, token)
            case fx.Received(name) | fx.Delivered(name) | fx.Lost(name) | fx.DrainAsked(name):
                if (learner := self._find_connected(name)) is not None:
                    self._route_learner_event(now, learner, event)
            case fx.Uploading(name, size):
                self.run_start.note_upload(now, name, size)
            case fx.Initialised(name, session, loss):
                self.run_start.note_upload_done(now, name, session, loss)
            case fx.Merged():
                self.rounds.commit_round(now, event)
            case fx.Unmergeable(number, reason, reset):
                if reset:
                    self.state.out.persist(ResetRecord(self.state.open_rounds[number].fragment, reason))
                self.rounds.fail_round(now, self.state.open_rounds[number], reason)
            case fx.Scored(number, loss):
                self.rollback.take_score(number, loss)
            case fx.Restorable():
                self.rollback.commit_rollback(now, event)
            case fx.Unrestorable(reason):
                self.rollback.give_up(reason)
            case fx.CutKept(cut, reason):
                self.cuts.note_syncer_part(cut, reason)
            case fx.CutWritten(cut, manifest):
                self.cuts.note_written(now, cut, manifest)
            case fx.ForwardingWanted(ticket, offset):
                self.peers.ask_for_stream(ticket, offset)
            case fx.ChangeAsked():
                self._asked = event.behind(self._asked)
            case fx.EndAsked(reason):
                self.end.begin_ending(now, reason)
            case fx.Over():
                for learner in self.members.learners.values():
                    self.joining.close_life(learner, "the run is over")
                    learner.left = True
            case fx.PullsSent(number, attempt, probed):
                if probed:
                    self.liveness.probe_sent(now, probed)
                else:
                    self.rounds.pulls_sent(now, number, attempt)
            case fx.StoodStill(seconds):
                self.liveness.stood_still(now, seconds)
                self.peers.put_off(now, seconds)
                self.beginning.put_off(now, seconds)
            case fx.RelayMeasured(learners, up_rate, down_rate):
                self.members.take_relay_rates(learners, up_rate, down_rate)
            case Tick():
                pass

    def _find_connected(self, name: str) -> KnownLearner | None:
        """One whose word counts. Once the run is over, accounts are closed of learners that are still connected: what
        was on its way then is passed over, since nothing of that life is left to judge it by."""
        learner = self.members.learners.get(name)
        return learner if learner is not None and learner.connected and not learner.closed else None

    def _route_learner_event(
        self, now: float, learner: KnownLearner, event: fx.Received | fx.Delivered | fx.Lost | fx.DrainAsked
    ) -> None:
        match event:
            case fx.Received(_, message):
                learner.last_heard = now
                self._route_message(now, learner, message)
            case fx.Delivered(_, contribution, refusal):
                learner.last_heard = now
                self.contributions.hear_contribution(now, learner, contribution, refusal)
            case fx.Lost(_, reason):
                self.joining.lose_connection(learner, reason)
            case fx.DrainAsked(_, reason):
                self.joining.ask_to_leave(learner, reason)

    def _route_message(self, now: float, learner: KnownLearner, message: msg.FromLearner) -> None:
        match message:
            case msg.Progress():
                self._only_counted = self.contributions.hear_report(now, learner, message)
            case msg.Decline(round=number, attempt=attempt, reason=reason):
                if (seat := self.rounds.find_seat(learner, number, attempt)) is not None:
                    self.rounds.note_nothing_to_give(self.state.open_rounds[number], seat, reason)
            case msg.Register():
                self.accounts.register_data(learner, message)
            case msg.CutSaved():
                self.cuts.note_saved(learner, message)
            case msg.Seek(after=after, frozen=frozen):
                self.rounds.leave_learner_out(learner, "it takes a peer's state first")
                self.peers.begin_recovery(now, learner, after, frozen=frozen)
            case msg.Settled():
                if (peer := self.peers.settle_recovery(now, learner, message)) is not None:
                    self.strikes.strike_helper(now, peer, learner, message.reason)
            case msg.Ready():
                self.peers.pass_on_ready(learner, message)
            case msg.Unable():
                self.peers.hear_unable(learner, message)
            case msg.Leave(reason=reason):
                self.joining.end_life(learner, reason)

    # ---- what need not be followed up -------------------------------------------------------------------------

    def _is_quiet(self, now: float, event: fx.SyncerEvent) -> bool:
        """Nothing can follow from it: a sign of life, one step of many before a round is due, or one answer of several
        that a round waits for."""
        if self.wake_at is None or now >= self.wake_at:
            return False
        match event:
            case fx.Received(_, msg.Heartbeat()):
                return True
            case fx.Received(name, msg.Progress()):
                return self._only_counted and self._brings_nothing_about(now, self.members.learners[name])
            case fx.Delivered(name, given):
                learner, round_ = self._find_connected(name), self.state.open_rounds.get(given.round)
                taken = learner is not None and self.rounds.has_given(learner, given.round, given.attempt)
                return taken and not given.probe and _awaits_answers(round_)
            case fx.Received(name, msg.Decline(round=number)):
                # Of a round that gathers not: it waits for one learner less.
                missing = _awaits_answers(self.state.open_rounds.get(number)) and self.rounds.watches_all()
                return missing and not self._may_be_asked_ahead([name])
            case fx.Received(_, msg.CutSaved()):
                return self.cuts.open is None or bool(self.cuts.open.awaited)
            case fx.Received(_, msg.Ready()) | fx.Received(_, msg.Settled(again=False)):
                return True  # its newcomer begins with its next report, and no other peer is asked
            case fx.RelayMeasured(names):
                return not self._may_be_asked_ahead(names)
            case _:
                return False

    def _brings_nothing_about(self, now: float, learner: KnownLearner) -> bool:
        """Whether this report cannot bring a round or the end about; then all that it moves is seen to here."""
        if self.phase != "running" or self.settings.synchronous or self._asked is not None:
            return False
        if self.beginning.holds_back:
            return False
        if self.assembly.returning or self.rounds.any_becomes_due(now) or self.end.budget_spent():
            return False
        due = self.rounds.closing.due_rounds()
        # An overdue round takes learners without a turn, from one moment to the next.
        if due and (self._may_be_asked_ahead([learner.name]) or any(round_.overdue for round_ in due)):
            return False
        if due and now >= (ends_at := self.rounds.closing.next_end(due)):
            return False
        assert self.wake_at is not None
        self.end.note_step(now)
        self.wake_at = min(self.wake_at, self.members.stall_limit(learner), ends_at if due else inf)
        return True

    def _may_be_asked_ahead(self, names: Sequence[str]) -> bool:
        known = (self.members.learners.get(name) for name in names)
        return any(learner is not None and self.rounds.has_turn_ahead(learner) for learner in known)

    # ---- what time brings -------------------------------------------------------------------------------------

    def _advance_all(self, now: float) -> None:
        """Let everything happen that may happen now, then say when to look again."""
        moved = True
        wakes: list[float] = []
        while moved:
            wakes.clear()
            self._change_settings()
            self._enter_due_phase()
            self.run_start.start_if_ready(now, wakes)
            for silent in self.liveness.find_silent(now, wakes):
                self.joining.expel_learner(silent, f"nothing heard for {self.settings.lost_after_s:g} s")
            self.beginning.begin_if_ready(now, wakes)
            self.rounds.closing.follow_members(now)
            self.joining.close_abandoned_lives(now, wakes)
            self.cuts.complete_if_ready(now, wakes)
            self._advance_peers(now, wakes)
            if self.rollback.begin_if_decided():
                break
            self.end.advance_end(now, wakes)
            self.joining.replace_overdue_uploader(now, wakes)
            held_back = self.beginning.holds_back
            if self.phase == "running" and not held_back and self.assembly.may_open(now, wakes):
                self.rounds.open_next(now)
                self.rounds.pull_ahead(now)
            moved = self.rounds.advance_rounds(now, wakes)
        self.wake_at = min([wake for wake in wakes if now < wake < inf], default=None)

    def _advance_peers(self, now: float, wakes: list[float]) -> None:
        if self.phase == "running":
            if not self.beginning.holds_back:  # a peer that does not train yet could not help
                self.peers.advance_recoveries(now, wakes)
        elif self.peers.open:
            self.peers.end_all_recoveries("the run ends" if self.phase != "empty" else "the run has no parameters yet")

    def _enter_due_phase(self) -> None:
        """The run has come to another phase of training (protocol/phases.py): its settings hold from the next round on.
        Rounds that are frozen are committed before, and none is frozen until then."""
        history, phases = self.state.history, self.settings.phases
        if not phases or self.phase != "running":
            return
        due = self._find_due_phase()
        self.state.changing_rounds |= due > history.training_phase
        if due <= history.training_phase or self.state.has_frozen_rounds():
            return
        settings = self.settings.in_phase(due, history.begun.settings)
        outer = outer_in(phases[due - 1], history.begun.outer, history.outer)
        what = f"phase {due} of {len(phases)}: {phases[due - 1].describe()}"
        self.state.change_settings(ChangedRecord(settings, outer, what, training_phase=due))
        self._tell_changed_rounds()
        self.state.out.note("phase", what, training_phase=due, **settings.phased_values)

    def _find_due_phase(self) -> int:
        """By the run's progress. In a synchronous run by its rounds, as its learners count (schedule.py)."""
        if self.settings.synchronous:
            return schedule.span_of(self.state.committed, self.settings).number
        return due_phase(self.settings.phases, self.progress)

    def _change_settings(self) -> None:
        """The operator's settings hold from now on, written down like a round. H, τ and adoption change as with a
        phase: between rounds."""
        self.state.changing_rounds = False
        if (asked := self._asked) is None:
            return
        self.state.changing_rounds = other_rounds = asked.settings.phased_values != self.settings.phased_values
        if self.state.is_merging() or (other_rounds and self.state.has_frozen_rounds()):
            return
        self._asked = None
        outer, before = asked.outer, self.state.history.outer
        if asked.reopen:
            outer, before = (outer_again(self.state.history.begun.outer, one) for one in (outer, before))
        differ = (asked.settings, outer) != (self.state.settings, before)
        scaled = asked.settings.learners != self.settings.learners
        progress = self.rounds.spent_share(asked.settings)
        self.state.change_settings(ChangedRecord(asked.settings, outer, asked.what, asked.reopen, progress=progress))
        if other_rounds:
            self._tell_changed_rounds()
        if asked.reopen:
            self.end.reopen_run()
            self.assembly.expect_everybody()
        if differ or not asked.reopen:  # a run may be opened again as it is
            named: dict[str, Any] = dict(self.settings.phased_values) if other_rounds else {}
            named |= {"learners": self.settings.learners} if scaled else {}
            self.state.out.note("changed", f"settings changed: {asked.what}", what=asked.what, **named)

    def _tell_changed_rounds(self) -> None:
        """H, τ or adoption are others from the next round on."""
        self.state.changing_rounds = False
        self.rounds.follow_settings()
        told = msg.SettingsChanged(settings=self.settings, since=self.state.committed)
        for learner in self.members.connected_learners():
            self.state.out.send(learner.name, told)


def _awaits_answers(round_: Round | None) -> bool:
    """Whether this round goes on with nothing before other answers are there."""
    return round_ is not None and round_.stage == "pulling" and round_.answers_missing > 0
