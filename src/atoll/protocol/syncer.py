"""The syncer's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

Here is which contributions may be merged. course.py says where a run stands, beginning.py how it comes by its first
parameters, assembling.py whom it waits for, ending.py when it ends; attendance.py lets learners in and out, watch.py
knows who is silent, stalled or mute, peers.py who helps a newcomer; gathering.py says when a round may freeze its
members, rounds.py what becomes of it.

Rules kept here, each with its test: nobody contributes who has not adopted a committed version of this run; a learner
whose contribution went into version v of a fragment contributes to it again only on a base ≥ v; the answer's own t,
steps, tokens and base are weighed, not the report's; what is not a channel's own, or claims more than can be, is
merged into nothing; three refusals in a row send a learner into recovery; one that makes no steps is not waited for;
one that says nothing is gone.
"""

from __future__ import annotations

from atoll.protocol.accounts import Accounts
from atoll.protocol.assembling import Assembling
from atoll.protocol.attendance import Attendance
from atoll.protocol.beginning import Beginning
from atoll.protocol.course import Course, Phase
from atoll.protocol.cut import Cuts
from atoll.protocol.effects import (
    ChangeAsked,
    CutKept,
    CutWritten,
    Delivered,
    DrainAsked,
    EndAsked,
    Greeted,
    Initialised,
    Lost,
    Merged,
    Over,
    Received,
    RelayWanted,
    Retune,
    SyncerEffect,
    SyncerEvent,
    Tick,
    Unmergeable,
)
from atoll.protocol.ending import End
from atoll.protocol.grace import Estimates
from atoll.protocol.history import History
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import (
    Contribution,
    CutSaved,
    Decline,
    FromLearner,
    Heartbeat,
    Leave,
    Progress,
    Ready,
    Recover,
    Refused,
    Register,
    Seek,
    Settled,
    Unable,
)
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.records import Begun, Changed, Reset
from atoll.protocol.rounds import Rounds
from atoll.protocol.rules import MOST, against_the_rules, not_its_own, wrong_report
from atoll.protocol.scrutiny import Scrutiny
from atoll.protocol.settings import Settings
from atoll.protocol.watch import Watch


class Syncer:
    def __init__(self, history: History) -> None:
        """Of a run that has just begun, or of one that an earlier term left behind."""
        self.settings = settings = history.settings
        assert settings.fragments > 0 and settings.sync_every > 0, "settings must be resolved"
        self.history = history
        self.run = history.run
        self.course = Course.of(history)
        self.out = Outbox(history)
        self.members = Membership(settings)
        self.accounts = Accounts(settings, self.members, self.out)
        self.scrutiny = Scrutiny(self.members, self.accounts)
        self.cuts = Cuts(settings, self.members, self.out)
        self.rounds = Rounds(settings, self.members, self.cuts, self.out)
        self.watch = Watch(settings, self.members, self.rounds, self.out)
        self.peers = Peers(settings, self.members, self.rounds, self.out)
        self.assembling = Assembling(settings, self.members, self.rounds, returning=bool(history.lives))
        self.beginning = Beginning(self.course, self.members, self.rounds, self.cuts, self.assembling, self.out)
        self.attendance = Attendance(
            settings,
            self.course,
            self.members,
            self.accounts,
            self.rounds,
            self.peers,
            self.beginning,
            self.out,
        )
        self.end = End(settings, self.course, self.members, self.rounds, self.peers, self.assembling, self.out)
        self.wake_at: float | None = None
        self._asked: ChangeAsked | None = None
        """A change that waits for the merge under way: a round is merged by one set of settings."""
        self._only_counted = False
        """The report just taken in moved counters and nothing else."""
        self._remember()

    @classmethod
    def fresh(cls, settings: Settings, *, run: str, fingerprint: str) -> Syncer:
        return cls(History(Begun(run, settings, {}, (), fingerprint)))

    def _remember(self) -> None:
        """Go on where the records end. Rounds that were not committed are void."""
        self.rounds.versions = list(self.history.versions)
        self.rounds.committed = self.rounds.next = self.history.committed
        for name, life in self.history.lives.items():
            self.members.remember(name, life)

    # ---- the face ---------------------------------------------------------------------------------------------

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        self.end.say_again()
        match event:
            case Greeted(hello):
                self.attendance.greet(now, hello)
            case Received(name, message):
                if (learner := self._known(name)) is not None:
                    self._receive(now, learner, message)
            case Delivered(name, contribution, refusal):
                if (learner := self._known(name)) is not None:
                    self._heard(now, learner, contribution)
                    self._contribute(now, learner, contribution, refusal)
            case Lost(name, reason):
                if (learner := self._known(name)) is not None:
                    self.attendance.lose(learner, "lost", reason)
            case Initialised(name):
                self.beginning.initialised(now, name)
            case Merged():
                self.rounds.commit(now, event)
            case Unmergeable(number, reason, reset):
                if reset:
                    self.out.persist(Reset(self.rounds.open[number].fragment, reason))
                self.rounds.fail(now, self.rounds.open[number], reason)
            case CutKept(cut, reason):
                self.cuts.kept(cut, reason)
            case CutWritten(cut, manifest):
                self.cuts.written(cut, manifest)
            case RelayWanted(ticket, offset):
                self.peers.wanted(ticket, offset)
            case ChangeAsked():
                self._asked = event
            case DrainAsked(name, reason):
                if (learner := self._known(name)) is not None:
                    self.attendance.ask_to_leave(learner, reason)
            case EndAsked(reason):
                self.end.begin(now, reason)
            case Over():
                for learner in self.members.learners.values():
                    self.attendance.close(learner, "the run is over")
            case Tick():
                pass
        if not self._is_quiet(now, event):
            self._advance(now)
        self._only_counted = False
        return self.out.take()

    def _is_quiet(self, now: float, event: SyncerEvent) -> bool:
        """Nothing can follow from it: a sign of life, one step of many before a round is due, or one answer of several
        that a round waits for."""
        if self.wake_at is None or now >= self.wake_at:
            return False
        match event:
            case Received(_, Heartbeat()):
                return True
            case Received(name, Progress()):
                return self._only_counted and self._is_before_the_next(now, self.members.learners[name])
            case Delivered(name, given):
                learner, round_ = self._known(name), self.rounds.open.get(given.round)
                taken = learner is not None and self.rounds.has_given(learner, given.round, given.attempt)
                return taken and not given.probe and round_ is not None and bool(round_.asked)
            case _:
                return False

    def _is_before_the_next(self, now: float, learner: Learner) -> bool:
        """Whether no report could bring a round or the end about; then all that this one moves is seen to here."""
        if self.phase != "running" or self._asked is not None:
            return False
        if self.assembling.returning or self.rounds.any_due() or self.end.tokens_spent():
            return False
        assert self.wake_at is not None
        self.end.stepped(now)
        self.wake_at = min(self.wake_at, self.members.stall_limit(learner))
        return True

    @property
    def phase(self) -> Phase:
        return self.course.phase

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]."""
        return self.rounds.spent()

    @property
    def versions(self) -> list[int]:
        return self.rounds.versions

    @property
    def committed(self) -> int:
        return self.rounds.committed

    @property
    def next_round(self) -> int:
        return self.rounds.next

    @property
    def global_step(self) -> int:
        return self.rounds.global_step

    @property
    def effective_h(self) -> float | None:
        return self.rounds.effective_h

    @property
    def estimates(self) -> Estimates:
        return self.rounds.gathering.estimates

    @property
    def grace_s(self) -> float:
        return self.rounds.gathering.grace_s

    @property
    def last_members(self) -> tuple[str, ...]:
        return self.rounds.last_members

    @property
    def last_reason(self) -> str:
        return self.rounds.last_reason

    def _change(self, asked: ChangeAsked) -> None:
        """Other settings from now on, written down like a round."""
        if any(round_.stage == "merging" for round_ in self.rounds.open.values()):
            return
        self._asked = None
        self.out.persist(Changed(asked.settings, asked.outer, asked.what, asked.reopen))
        self.out.add(Retune(asked.outer))
        self.settings = asked.settings
        for room in (
            *(self.members, self.accounts, self.cuts, self.rounds, self.rounds.gathering, self.watch, self.peers),
            *(self.assembling, self.attendance, self.end, self.end.drain),
        ):
            room.settings = asked.settings
        if asked.reopen:
            self.end.reopen()
        self.out.note("changed", f"settings changed: {asked.what}", what=asked.what)

    # ---- reports and contributions ------------------------------------------------------------------------------

    def _known(self, name: str) -> Learner | None:
        learner = self.members.learners.get(name)
        return learner if learner is not None and learner.connected else None

    def _heard(self, now: float, learner: Learner, message: FromLearner) -> None:
        learner.last_heard = now
        self.out.hear(message.clock)

    def _receive(self, now: float, learner: Learner, message: FromLearner) -> None:
        self._heard(now, learner, message)
        match message:
            case Progress():
                self._report(now, learner, message)
            case Decline(round=number, attempt=attempt, reason=reason):
                if (seat := self.rounds.seat(learner, number, attempt)) is not None:
                    self.rounds.nothing_from(self.rounds.open[number], seat, reason)
            case Register():
                self.accounts.register(learner, message)
            case CutSaved():
                self.cuts.saved(learner, message)
            case Seek(after=after):
                self.rounds.unseat(learner, "it takes a peer's state first")
                self.peers.seek(now, learner, after)
            case Settled():
                self.peers.settled(now, learner, message)
            case Ready():
                self.peers.ready(learner, message)
            case Unable():
                self.peers.unable(learner, message)
            case Leave(reason=reason):
                self.attendance.lose(learner, "left", reason)

    def _report(self, now: float, learner: Learner, progress: Progress) -> None:
        if not self._tape(learner, progress):
            return
        if progress.incarnation != learner.incarnation:
            return
        if (wrong := wrong_report(learner, progress, self.versions)) is not None:
            self.attendance.expel(learner, wrong)
            return
        if (beyond := self.scrutiny.report(now, learner, progress)) is not None:
            self._strike(now, learner, f"report of {learner.name} refused", beyond, claim=True)
            return
        self.members.report(now, learner, progress)
        self.accounts.reported(learner, progress)
        if not progress.seeking:
            self.peers.gave_up(learner)
        if learner.state == "joining" and self.phase != "empty" and self._has_recovered(progress):
            learner.state, learner.last_step_at, learner.recovered = "training", now, True
            text = f"{learner.name} took the run's parameters and may contribute"
            self.out.note("recovered", text, learner, seconds=round(now - learner.joined_at, 3))
        same = not self.rounds.gathering.watch(now)
        self.rounds.gathering.pace.stepped(learner.name, progress.t)
        self._only_counted = same and learner.live and not learner.stopped and not self.settings.synchronous

    def _tape(self, learner: Learner, said: Progress | Contribution) -> bool:
        """Keep what it says of its tape for the next record. False: no learner says that, and it is gone."""
        if not 0 <= said.taped < MOST:
            self.attendance.expel(learner, f"its tape goes on at entry {said.taped}")
            return False
        missing = self.out.taping.heard(learner.name, learner.incarnation, said.taped, said.tape)
        if missing is not None:
            self.out.note("warning", f"{learner.name}: {missing}: the run cannot be replayed past there", learner)
        if self.out.taping.is_full(learner.name):
            self.attendance.expel(learner, "it said more of its tape than a learner keeps")
        return learner.connected

    def _has_recovered(self, report: Progress) -> bool:
        """It holds a committed version of every fragment, and waits for no peer's state."""
        return min(report.versions) >= 0 and not report.seeking

    def _contribute(self, now: float, learner: Learner, given: Contribution, refusal: str | None) -> None:
        if (foreign := not_its_own(learner, given, self.run, self.history.term)) is not None:
            self._turn_away(learner, given, foreign)
            return
        if not self._tape(learner, given):
            return
        if given.probe:
            self.out.discard(learner.name, given.round, given.attempt)
            self.watch.answered(learner)
            return
        if self.rounds.has_given(learner, given.round, given.attempt):
            return  # said twice: once is what counts, and its body is still needed
        seat = self.rounds.seat(learner, given.round, given.attempt)
        if seat is None:
            self.out.discard(learner.name, given.round, given.attempt)
            return
        round_ = self.rounds.open[given.round]
        refusal = refusal or against_the_rules(learner, round_, given, self.versions[round_.fragment])
        claim = refusal is None and given.steps > 0
        refusal = refusal or (self.scrutiny.contribution(now, learner, given) if claim else None)
        if refusal is not None:
            self.rounds.leave_out(round_, seat, f"refused: {refusal}")
            what = f"contribution of {learner.name} to round {round_.t} refused"
            self._strike(now, learner, what, refusal, round=round_.t, claim=claim)
        elif given.steps == 0 or given.tokens == 0:
            self.rounds.nothing_from(round_, seat, "nothing to give: no steps since its last adoption")
        else:
            seat.give(given)
            round_.answered_at = now
            learner.misses = learner.strikes = 0

    def _turn_away(self, learner: Learner, given: Contribution, reason: str) -> None:
        """It is not this channel's to give: no numbers of its own are broken, so it is no strike."""
        if self.rounds.has_given(learner, given.round, given.attempt):
            return
        seat = self.rounds.seat(learner, given.round, given.attempt)
        self.out.discard(learner.name, given.round, given.attempt)
        if seat is not None:
            self.rounds.leave_out(self.rounds.open[given.round], seat, f"refused: {reason}")
        elif given.incarnation < learner.incarnation:
            return  # its life ended while the answer was on its way: nobody's mistake
        text = f"contribution of {learner.name} to round {given.round} refused: {reason}"
        self.out.note("refused", text, learner, round=given.round, reason=reason)
        self.out.send(learner.name, Refused(reason=text, final=False))

    def _strike(self, now: float, learner: Learner, what: str, reason: str, **data: object) -> None:
        """Its numbers are broken, or not to be believed; a few in a row, and it starts over."""
        learner.strikes += 1
        self.out.note("refused", f"{what}: {reason}", learner, **data, reason=reason)
        if learner.strikes >= self.settings.strikes:
            text = (
                f"{learner.name} is in quarantine after {learner.strikes} refusals in a row; it recovers from the run"
            )
            self.out.note("quarantined", text, learner)
            self.rounds.unseat(learner, "it is in quarantine")
            self.peers.lost(learner, "it is in quarantine")
            self.attendance.close(learner, f"its numbers are broken: {reason}")
            self.members.restart(now, learner)
            self.accounts.open(learner)
            self.out.send(learner.name, Recover(incarnation=learner.incarnation, reason=reason))

    # ---- what time brings ---------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Let everything happen that may happen now, then say when to look again."""
        moved = True
        wakes: list[float] = []
        while moved:
            wakes.clear()
            if self._asked is not None:
                self._change(self._asked)
            for silent in self.watch.turn(now, wakes):
                self.attendance.expel(silent, f"nothing heard for {self.settings.lost_after_s:g} s")
            self.rounds.gathering.watch(now)
            self.attendance.abandon(now, wakes)
            self.cuts.turn(now, wakes)
            self._help(now, wakes)
            self.end.turn(now, wakes)
            if self.phase == "running" and self.assembling.may_open(now, wakes):
                self.rounds.open_next(now)
            moved = self.rounds.turn(now, wakes)
        self.wake_at = min([wake for wake in wakes if wake > now], default=None)

    def _help(self, now: float, wakes: list[float]) -> None:
        if self.phase == "running":
            self.peers.turn(now, wakes)
        elif self.peers.open:
            self.peers.end("the run ends" if self.phase != "empty" else "the run has no parameters yet")
