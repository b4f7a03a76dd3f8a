"""The syncer's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

A run's way: *empty* (the first joiner is asked for version 0) → *running* (rounds.py, one round after another) →
*ending* (budget spent or the operator asked: learners stop, then one unpaced cycle of P rounds brings their last steps
in) → *finished*. Here is who takes part, which contributions may be merged, and the end; watch.py knows who is silent,
stalled or mute, peers.py who helps a newcomer; gathering.py says when a round may freeze its members, rounds.py what
becomes of it.

Rules kept here, each with its test: nobody contributes who has not adopted a committed version of this run; a learner
whose contribution went into version v of a fragment contributes to it again only on a base ≥ v; the answer's own t,
steps, tokens and base are weighed, not the report's; what is not a channel's own, or claims more than can be, is
merged into nothing; three refusals in a row send a learner into recovery; one that makes no steps is not waited for;
one that says nothing is gone.
"""

from __future__ import annotations

from operator import gt
from typing import Literal

from atoll.protocol import schedule
from atoll.protocol.accounts import Accounts
from atoll.protocol.clock import SYNCER
from atoll.protocol.cut import Cuts
from atoll.protocol.drain import Drain
from atoll.protocol.effects import (
    ChangeAsked,
    CutKept,
    CutWritten,
    Delivered,
    DrainAsked,
    EndAsked,
    Expel,
    Finished,
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
    Uploading,
)
from atoll.protocol.grace import Estimates
from atoll.protocol.history import History
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import (
    MOST,
    Contribution,
    CutSaved,
    Decline,
    Ending,
    Finish,
    FromLearner,
    Heartbeat,
    Hello,
    Leave,
    Progress,
    Ready,
    Recover,
    Refused,
    Register,
    Seek,
    Settled,
    Started,
    Unable,
    Welcome,
)
from atoll.protocol.messages import Drain as DrainMessage
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.records import Begun, Changed, Ended, Reset
from atoll.protocol.records import Started as StartedRecord
from atoll.protocol.rounds import Rounds
from atoll.protocol.rules import against_the_rules, not_its_own, wrong_hello, wrong_report
from atoll.protocol.scrutiny import Scrutiny
from atoll.protocol.settings import Settings
from atoll.protocol.upload import Upload
from atoll.protocol.watch import Watch

Phase = Literal["empty", "running", "ending", "finished"]


RETURN_S = 1.5
"""So long a new term's rounds wait for the learners it knows: whoever lives dials every second."""


class Syncer:
    def __init__(self, history: History) -> None:
        """Of a run that has just begun, or of one that an earlier term left behind."""
        self.settings = settings = history.settings
        assert settings.fragments > 0 and settings.sync_every > 0, "settings must be resolved"
        self.history = history
        self.run, self.fingerprint = history.run, history.begun.fingerprint
        self.phase: Phase = "finished" if history.finished else "running" if history.started else "empty"
        self.out = Outbox(history)
        self.members = Membership(settings)
        self.accounts = Accounts(settings, self.members, self.out)
        self.scrutiny = Scrutiny(self.members, self.accounts)
        self.cuts = Cuts(settings, self.members, self.out)
        self.rounds = Rounds(settings, self.members, self.cuts, self.out)
        self.watch = Watch(settings, self.members, self.rounds, self.out)
        self.peers = Peers(settings, self.members, self.rounds, self.out)
        self.drain = Drain(settings, self.members, self.rounds)
        self.wake_at: float | None = None
        self._uploader: str | None = None
        self._uploader_holds = False
        self._upload = Upload()
        self._started_at = self._idle_since = 0.0
        self._end_reason = history.ended
        self._opened = False
        """Its first round of this term is open."""
        self._assembling = bool(history.lives)
        """The learners of an earlier term are coming back."""
        self._end_by: float | None = None
        self._asked: ChangeAsked | None = None
        """A change that waits for the merge under way: a round is merged by one set of settings."""
        self._only_counted = False
        """The report just taken in moved counters and nothing else."""
        self._was_over = history.finished
        """An earlier term came to the end and could not say so to everybody."""
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
        self.members.recall(self.history.progress)

    # ---- the face ---------------------------------------------------------------------------------------------

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        if self._was_over:
            self._was_over = False
            self.out.add(Finished(self._end_reason))
        match event:
            case Greeted(hello):
                self._greet(now, hello)
            case Received(name, message):
                if (learner := self._known(name)) is not None:
                    self._receive(now, learner, message)
            case Delivered(name, contribution, refusal):
                if (learner := self._known(name)) is not None:
                    self._heard(now, learner, contribution)
                    self._contribute(now, learner, contribution, refusal)
            case Lost(name, reason):
                if (learner := self._known(name)) is not None:
                    self._lose(learner, "lost", reason)
            case Initialised(name):
                self._start(now, name)
            case Uploading(name, size):
                if name == self._uploader:
                    self._upload.moved(now, size)
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
                    learner.draining = reason
                    self.out.send(name, DrainMessage(reason=reason))
                    self.out.note("draining", f"{name} is asked to leave: {reason}", learner)
            case EndAsked(reason):
                self._end(now, reason)
            case Over():
                for learner in self.members.learners.values():
                    self._close(learner, "the run is over")
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
        tokens = self.settings.tokens
        if self.phase != "running" or self._assembling or self._asked is not None or self.rounds.any_due():
            return False
        if tokens and self.members.tokens() >= tokens:
            return False
        assert self.wake_at is not None
        self._idle_since = now
        self.wake_at = min(self.wake_at, self.members.stall_limit(learner))
        return True

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
        rooms = (self.members, self.accounts, self.cuts, self.rounds, self.rounds.gathering, self.watch, self.drain)
        for room in (*rooms, self.peers):
            room.settings = asked.settings
        if asked.reopen and self.phase == "finished":
            self.phase, self._end_reason, self._was_over = "running", "", False
        self.out.note("changed", f"settings changed: {asked.what}", what=asked.what)

    # ---- joining and leaving ----------------------------------------------------------------------------------

    def _greet(self, now: float, hello: Hello) -> None:
        before = self.members.learners.get(hello.learner)
        same = before is not None and before.session == hello.session
        if self.phase == "finished" and not same:
            self.out.send(hello.learner, Refused(reason="the run is over", over=True))
            return
        if before is not None and before.connected:
            self._lose(before, "lost", "it dialled again" if same else "another process took its name")
        if (wrong := wrong_hello(hello, self.run, self.settings.fragments)) is not None:
            self._turn_off(hello, wrong)
            return
        if before is not None and not same:
            self._close(before, "another process took its name")
        elif before is not None and (self._is_ahead(hello) or hello.incarnation > before.incarnation):
            text = f"{before.name} knows what the disk did not keep: it takes the run's parameters anew"
            self.out.note("warning", text, before)
            self._close(before, "it knew what the disk did not keep")
        learner, new = self.members.greet(now, hello, self.run)
        if new:
            self.accounts.open(learner)
        if hello.run == self.run:
            self.out.hear(hello.clock)
        if self.phase == "empty" and self._is_better_uploader(hello):
            self._uploader, self._uploader_holds = hello.learner, _holds_a_model(hello)
            self._upload.asked()
        self._welcome(learner)
        word = "joined" if new else "came back"
        self.out.note("joined", f"{learner.name} {word} (incarnation {learner.incarnation})", learner)
        if self.phase == "ending":
            self.out.send(learner.name, Ending(reason=self._end_reason))
        elif self.phase == "finished":
            self.out.send(learner.name, Finish(reason=self._end_reason, versions=tuple(self.versions)))
        elif learner.draining:
            self.out.send(learner.name, DrainMessage(reason=learner.draining))  # for all we know it did not hear it

    def _turn_off(self, hello: Hello, wrong: str) -> None:
        """Nobody joins like this; whoever had the name has lost its channel, and may dial again."""
        known = self.members.learners.get(hello.learner)
        self.out.note("refused", f"{hello.learner} was refused: {wrong}", known, reason=wrong)
        self.out.send(hello.learner, Refused(reason=wrong))
        self.out.add(Expel(hello.learner, wrong))

    def _is_ahead(self, hello: Hello) -> bool:
        """With durability = "cut" a crash of the machine may cost rounds that learners have heard of, and others may
        have taken their place: what it knows must have been there when each term began that it has not heard of."""
        found = [(rounds, versions) for term, rounds, versions in self.history.began if 0 < hello.term < term]
        heard = hello.clock.get(SYNCER, 0)
        return hello.run == self.run and (
            any(heard > rounds for rounds, _ in found)
            or any(map(gt, hello.versions, self.versions))
            or any(held > kept for _, versions in found for held, kept in zip(hello.versions, versions, strict=False))
        )

    def _is_better_uploader(self, hello: Hello) -> bool:
        """The first that comes; but one that has adopted a global model goes before one with weights of its own, while
        nothing of these has come."""
        goes_before = _holds_a_model(hello) and not self._uploader_holds and not self._upload.begun
        return self._uploader is None or (goes_before and hello.learner not in self._upload.tried)

    def _welcome(self, learner: Learner) -> None:
        welcome = Welcome(
            run=self.run,
            incarnation=learner.incarnation,
            settings=self.settings,
            fingerprint=self.fingerprint,
            versions=tuple(self.versions),
            gathering=self.rounds.aim,
            reset=learner.reset,
            upload=self.phase == "empty" and self._uploader == learner.name,
            progress=self.history.progress,
            global_step=self.global_step,
            committed=self.committed,
            merged=learner.last_merged(),
            leases=self.accounts.held(learner),
            taped=self.history.lives[learner.name].taped,
            cuts=self.history.kept_cuts,
            session=learner.session,
            protocol=learner.protocol,
        )
        self.out.send(learner.name, welcome)

    def _lose(self, learner: Learner, kind: str, reason: str) -> None:
        unmerged = round(learner.unmerged_tokens())
        learner.state, learner.tokens = "gone", ()
        self.rounds.unseat(learner, reason)
        self.peers.lost(learner, reason)
        text = f"{learner.name} is gone: {reason}"
        if kind == "left":
            self._close(learner, reason)
        known = {"t": learner.t, "tokens": learner.tokens_total, "busy_s": learner.busy_s}
        self.out.note(kind, text, learner, **known, unmerged_tokens=unmerged)
        if self._uploader == learner.name and self.phase == "empty":
            self._ask_next_uploader()

    def _ask_next_uploader(self) -> None:
        """What the last one sent is discarded; the next joiner is asked."""
        heirs = sorted(self.members.connected(), key=lambda one: (one.name in self._upload.tried, one.joined_at))
        self._uploader = heirs[0].name if heirs else None
        self._upload.asked()
        if heirs:
            self.out.note("warning", f"{heirs[0].name} is asked for the first parameters instead", heirs[0])
            self._welcome(heirs[0])

    def _hurry(self, now: float, wakes: list[float]) -> None:
        """Whoever is asked for the first parameters and sends nothing more has had its chance, if another is there."""
        if self._uploader is None or len(self.members.connected()) < 2:
            return
        until = self._upload.until(now)
        wakes.append(until)
        if now >= until:
            text = f"{self._uploader} was asked for the first parameters, and nothing new of them came"
            self.out.note("warning", text, self.members.learners[self._uploader])
            self._upload.gave_up(self._uploader, {one.name for one in self.members.connected()})
            self._ask_next_uploader()
            wakes.append(self._upload.until(now))

    def _start(self, now: float, uploader: str) -> None:
        if self.phase != "empty" or uploader != self._uploader:
            return
        self.cuts.first()
        self.out.persist(StartedRecord(uploader))
        self.phase, self._started_at = "running", now
        self.rounds.versions = [0] * self.settings.fragments
        self.out.note("initial", f"{uploader} gave the first parameters")
        for learner in self.members.connected():
            self.out.send(learner.name, Started(uploader=uploader, gathering=self.rounds.aim))

    def _close(self, learner: Learner, reason: str) -> None:
        self.accounts.close(learner, reason, self.rounds.under_way(learner))

    def _known(self, name: str) -> Learner | None:
        learner = self.members.learners.get(name)
        return learner if learner is not None and learner.connected else None

    def _expel(self, learner: Learner, reason: str) -> None:
        self._lose(learner, "lost", reason)
        self.out.add(Expel(learner.name, reason))

    # ---- reports and contributions ------------------------------------------------------------------------------

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
                self._lose(learner, "left", reason)

    def _report(self, now: float, learner: Learner, progress: Progress) -> None:
        if not self._tape(learner, progress):
            return
        if progress.incarnation != learner.incarnation:
            return
        if (wrong := wrong_report(learner, progress, self.versions)) is not None:
            self._expel(learner, wrong)
            return
        if (beyond := self.scrutiny.report(now, learner, progress)) is not None:
            self._strike(now, learner, f"report of {learner.name} refused", beyond, claim=True)
            return
        self.members.report(now, learner, progress, self.rounds.furthest)
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
            self._expel(learner, f"its tape goes on at entry {said.taped}")
            return False
        missing = self.out.taping.heard(learner.name, learner.incarnation, said.taped, said.tape)
        if missing is not None:
            self.out.note("warning", f"{learner.name}: {missing}: the run cannot be replayed past there", learner)
        if self.out.taping.is_full(learner.name):
            self._expel(learner, "it said more of its tape than a learner keeps")
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
            learner.answer_s.add(now - round_.frozen_at)
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
            self._close(learner, f"its numbers are broken: {reason}")
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
                self._expel(silent, f"nothing heard for {self.settings.lost_after_s:g} s")
            self.rounds.gathering.watch(now)
            self._abandon(now, wakes)
            self.cuts.turn(now, wakes)
            self._help(now, wakes)
            self._end_if_spent(now, wakes)
            if self.phase == "empty":
                self._hurry(now, wakes)
            if self.phase == "running":
                self._open_next(now, wakes)
            elif self.phase == "ending" and self.drain.step(now, wakes):
                self._finish(self._end_reason)
            moved = self.rounds.turn(now, wakes)
        self.wake_at = min([wake for wake in wakes if wake > now], default=None)

    def _help(self, now: float, wakes: list[float]) -> None:
        if self.phase == "running":
            self.peers.turn(now, wakes)
        elif self.peers.open:
            self.peers.end("the run ends" if self.phase != "empty" else "the run has no parameters yet")

    def _abandon(self, now: float, wakes: list[float]) -> None:
        """Who has been away for too long is not counted on any more: its data goes to others."""
        for learner in [one for one in self.members.learners.values() if one.state == "gone" and not one.closed]:
            learner.last_heard = learner.last_heard or now
            until = learner.last_heard + self.settings.abandon_s
            if now >= until:
                self._close(learner, f"away for {self.settings.abandon_s:g} s")
            else:
                wakes.append(until)

    def _open_next(self, now: float, wakes: list[float]) -> None:
        """A new term lets the learners come back first: who misses its rounds would drop what it trained on meanwhile.
        A synchronous run begins, and goes on in a new term, when all its learners are there, or a while later."""
        if self._assembling and self._end_by is not None:
            until = self._end_by - max(0.0, self.settings.patience_s - RETURN_S)
            wakes.append(until)
            if now < until:
                return
        if self.settings.synchronous and not self._opened:
            self._started_at = self._started_at or now
            live, late_at = self.members.live(), self._started_at + self.settings.assemble_s
            known = sum(not one.closed for one in self.members.learners.values())
            awaited = self.settings.learners if self.next_round == 0 else known
            wakes.append(late_at)
            if len(live) < awaited and (now < late_at or not live):
                return
        self._opened = True
        self.rounds.open_next(now)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _end_if_spent(self, now: float, wakes: list[float]) -> None:
        last, tokens = schedule.last_round(self.settings), self.settings.tokens
        if self.phase != "running" or not self._may_end(now, wakes) or self.phase != "running":
            return
        if last is not None and self.committed >= last:
            self._end(now, f"{self.settings.steps:,} steps are done")
        elif tokens and self.members.tokens() >= tokens:
            self._end(now, f"the budget of {tokens:,} tokens is spent")
        elif self._everyone_stopped(now, wakes):
            self._end(now, "every learner has stopped")

    def _may_end(self, now: float, wakes: list[float]) -> bool:
        """A new term first lets the learners come back: their last steps are to be collected."""
        if not self._assembling:
            return True
        away = [one for one in self.members.learners.values() if one.state != "training" and not one.closed]
        self._end_by = self._end_by if self._end_by is not None else now + self.settings.patience_s
        self._assembling = bool(away) and now < self._end_by
        if self._assembling:
            wakes.append(self._end_by)
        elif self.history.ended:
            self._end(now, self.history.ended)
        return not self._assembling

    def _everyone_stopped(self, now: float, wakes: list[float]) -> bool:
        """All the run was meant for; or those that are there, and nobody else has come for a while."""
        there = self.members.connected()
        if not there or not all(one.stopped for one in there):
            self._idle_since = now
            return False
        wakes.append(self._idle_since + self.settings.assemble_s)
        stopped = sum(one.stopped for one in self.members.learners.values())  # also those that have left since
        return stopped >= self.settings.learners or now >= self._idle_since + self.settings.assemble_s

    def _end(self, now: float, reason: str) -> None:
        if self.phase == "empty":
            self._finish(reason)
        if self.phase != "running":
            return
        if not self.history.ended:
            self.out.persist(Ended(reason))
        self.phase, self._end_reason = "ending", reason
        self.out.note("ending", f"the run ends: {reason}; the last steps are collected")
        self.drain.begin(now)
        self.peers.end("the run ends")
        for learner in self.members.connected():
            self.out.send(learner.name, Ending(reason=reason))

    def _finish(self, reason: str) -> None:
        self.out.persist(Ended(reason, final=True))
        self.phase, self._end_reason = "finished", reason
        self.out.note("finishing", f"the run is over: {reason}")
        for learner in self.members.connected():
            self.out.send(learner.name, Finish(reason=reason, versions=tuple(self.versions)))
        self.out.add(Finished(reason))


def _holds_a_model(hello: Hello) -> bool:
    return bool(hello.versions) and min(hello.versions) >= 0
