"""How learners join, come back and leave, and how a run begins.

How a killed learner comes back, step by step: docs/protocol.md. machine.py routes a Leave to `end_life`, which closes
the life, and a broken connection to `lose_connection`, which does not.

Rules kept here:
- whoever's hello comes here has the name: which process may say it is decided before (succession.py);
- a learner that knows of rounds which the disk lost begins a new life;
- a learner that comes back is told again what it may have missed;
- once a run is over, only the last process of each name is let in, and only until it has left;
- a learner that was away for `abandon_s` is given up: its life is closed (accounts.py).
"""

from __future__ import annotations

from operator import gt

from atoll.protocol.clock import SYNCER
from atoll.protocol.messages import PROTOCOL, Drain, Ending, Finish, Hello, Refused, Started, Welcome
from atoll.protocol.records import StartedRecord
from atoll.protocol.relay import RELAY_BACK
from atoll.protocol.syncer.accounts import Accounts
from atoll.protocol.syncer.beginning import Beginning
from atoll.protocol.syncer.cuts import Cuts
from atoll.protocol.syncer.effects import Expel
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.peers import Peers
from atoll.protocol.syncer.returning import Returns
from atoll.protocol.syncer.rounds import Rounds
from atoll.protocol.syncer.state import SyncerState


class Joining:
    def __init__(
        self,
        state: SyncerState,
        accounts: Accounts,
        rounds: Rounds,
        peers: Peers,
        run_start: RunStart,
        beginning: Beginning,
    ) -> None:
        self.state, self.accounts, self.rounds = state, accounts, rounds
        self.peers, self.run_start, self.beginning = peers, run_start, beginning
        self.returns = Returns(state, rounds)

    # ---- coming -------------------------------------------------------------------------------------------------

    def greet_learner(self, now: float, hello: Hello, token: str) -> None:
        before = self.state.members.learners.get(hello.learner)
        if self.state.phase == "finished" and (before is None or before.session != hello.session or before.left):
            self.state.out.send(hello.learner, Refused(reason="the run is over", over=True))
            return
        if (wrong := wrong_hello(hello, self.state.history.run, self.state.settings.fragments)) is not None:
            self._refuse_hello(before, hello, wrong)
            return
        if before is not None:
            self._take_the_place_of(before, hello)
        away_s, away_t = self.returns.note_hello(now, before, hello)
        closed = before.closed_for if before is not None and before.session == hello.session else ""
        learner, new = self.state.members.find_or_begin_life(now, hello, self.state.history.run)
        if new:
            self.accounts.open_life(learner)
        self.accounts.record_owner(learner, token)
        self.run_start.consider_uploader(hello)
        self._send_welcome(learner, away_s, away_t, closed)
        word = "joined" if new else "is connected again"
        text = f"{learner.name} {word} (incarnation {learner.incarnation})"
        known_as = hello.incarnation if hello.run == self.state.history.run else 0
        self.state.out.note("joined", text, learner, declared=learner.declared, known_as=known_as)
        self._tell_again(learner)

    def _refuse_hello(self, before: KnownLearner | None, hello: Hello, wrong: str) -> None:
        """A hello against the rules: refused. The process that had the name lost its connection, and may dial again."""
        if before is not None:
            self._drop_connection(before, hello)
        self.state.out.note("refused", f"{hello.learner} was refused: {wrong}", before, reason=wrong)
        self.state.out.send(hello.learner, Refused(reason=wrong))
        self.state.out.add_effect(Expel(hello.learner, wrong))

    def _drop_connection(self, before: KnownLearner, hello: Hello) -> None:
        if before.connected:
            same = before.session == hello.session
            self.lose_connection(before, "it dialled again" if same else "another process took its name")

    def _take_the_place_of(self, before: KnownLearner, hello: Hello) -> None:
        """Its connection is gone; so is its life if another process took its name, if it was part of a lost run that
        this one goes on for, or if it knows rounds that the syncer's disk lost."""
        self._drop_connection(before, hello)
        if before.session != hello.session:
            self.close_life(before, "another process took its name")
        elif hello.run in self.state.history.begun.succeeds:
            self.close_life(before, f"it was part of run {hello.run}, which this run goes on for")
        elif self._is_ahead(hello) or hello.incarnation > before.incarnation:
            text = f"{before.name} knows what the disk did not keep: it takes the run's parameters anew"
            self.state.out.note("warning", text, before)
            self.close_life(before, "it knew what the disk did not keep")

    def _is_ahead(self, hello: Hello) -> bool:
        """With durability = "cut" a crash of the machine may cost rounds that learners have heard of, and others may
        have taken their place: what it knows must have been there when each term began that it has not heard of."""
        found = [(rounds, versions) for term, rounds, versions in self.state.history.began if 0 < hello.term < term]
        heard = hello.clock.get(SYNCER, 0)
        return hello.run == self.state.history.run and (
            any(heard > rounds for rounds, _ in found)
            or any(map(gt, hello.versions, self.state.versions))
            or any(held > kept for _, versions in found for held, kept in zip(hello.versions, versions, strict=False))
        )

    def _send_welcome(self, learner: KnownLearner, away_s: float = 0.0, away_t: int = 0, closed: str = "") -> None:
        welcome = Welcome(
            run=self.state.history.run,
            incarnation=learner.incarnation,
            settings=self.state.settings,
            fingerprint=self.state.history.begun.fingerprint,
            versions=tuple(self.state.versions),
            gathering=self.state.gathering_round,
            reset=learner.reset,
            upload=self.run_start.asks_for_upload(learner),
            progress=self.state.history.schedule_progress,
            global_step=self.state.history.global_step,
            committed=self.state.committed,
            merged=learner.last_merged(),
            leases=self.accounts.leases_held(learner),
            taped=self.state.history.lives[learner.name].taped,
            cuts=self.state.history.kept_cuts,
            session=learner.session,
            protocol=PROTOCOL,
            least=tuple(self.state.members.least) if max(self.state.members.least) > 0 else (),
            index=self.state.history.index_of(learner.name),
            frozen=self.state.history.begun.frozen,
            waits=self.beginning.holds_back,
            succeeds=self.state.history.begun.succeeds,
            away_s=away_s,
            away_t=away_t,
            closed=closed,
        )
        self.state.out.send(learner.name, welcome)

    def _tell_again(self, learner: KnownLearner) -> None:
        """It may have missed these messages."""
        if self.state.phase == "ending":
            self.state.out.send(learner.name, Ending(reason=self.state.end_reason))
        elif self.state.phase == "finished":
            self.state.out.send(learner.name, Finish(reason=self.state.end_reason, versions=tuple(self.state.versions)))
        elif learner.draining:
            self.state.out.send(learner.name, Drain(reason=learner.draining))

    # ---- going --------------------------------------------------------------------------------------------------

    def ask_to_leave(self, learner: KnownLearner, reason: str) -> None:
        learner.draining = self.state.members.asked_to_leave[learner.session] = reason
        self.state.out.send(learner.name, Drain(reason=reason))
        self.state.out.note("draining", f"{learner.name} is asked to leave: {reason}", learner)

    def lose_connection(self, learner: KnownLearner, reason: str) -> None:
        """It may come back: its life stays open."""
        unmerged = self._disconnect(learner, reason)
        self._tell_gone("lost", learner, reason, unmerged)

    def end_life(self, learner: KnownLearner, reason: str) -> None:
        """It said Leave: its life is closed at once."""
        unmerged, learner.left = self._disconnect(learner, reason), True
        self.state.members.asked_to_leave.pop(learner.session, None)
        self.close_life(learner, reason)
        self._tell_gone("left", learner, reason, unmerged)

    def _disconnect(self, learner: KnownLearner, reason: str) -> int:
        """No round, snapshot or newcomer waits for it; returns its tokens that no version contains."""
        unmerged = round(learner.unmerged_tokens())
        learner.state, learner.tokens = "gone", ()
        self.state.members.update_medians(learner)
        self.rounds.leave_learner_out(learner, reason)
        self.rounds.cuts.lose_learner(learner)
        self.peers.stop_helping_and_seeking(learner, reason)
        return unmerged

    def _tell_gone(self, kind: str, learner: KnownLearner, reason: str, unmerged: int) -> None:
        known = {"t": learner.t, "tokens": learner.tokens_total, "busy_s": learner.busy_s, "reason": reason}
        text = f"{learner.name} {'has left' if kind == 'left' else 'is away'}: {reason}"
        if reason == RELAY_BACK:  # it is back at once by another way, and no one has to look after it
            known["moved"], text = True, f"{learner.name} moves back to its relay"
        self.state.out.note(kind, text, learner, **known, unmerged_tokens=unmerged)
        if (next_uploader := self.run_start.replace_lost_uploader(learner)) is not None:
            self._send_welcome(next_uploader)

    def replace_overdue_uploader(self, now: float, wakes: list[float]) -> None:
        """Replace an uploader that sends nothing."""
        if (next_uploader := self.run_start.replace_overdue_uploader(now, wakes)) is not None:
            self._send_welcome(next_uploader)

    def expel_learner(self, learner: KnownLearner, reason: str) -> None:
        self.lose_connection(learner, reason)
        self.state.out.add_effect(Expel(learner.name, reason))

    def close_life(self, learner: KnownLearner, reason: str) -> None:
        self.accounts.close_life(learner, reason, self.rounds.under_way(learner))

    def close_abandoned_lives(self, now: float, wakes: list[float]) -> None:
        """Close the lives of those that have been away for too long."""
        for learner in [one for one in self.state.members.learners.values() if one.state == "gone" and not one.closed]:
            learner.last_heard = learner.last_heard or now
            until = learner.last_heard + self.state.settings.abandon_s
            if now >= until:
                self.close_life(learner, f"away for {self.state.settings.abandon_s:g} s")
                learner.closed_for = f"abandon_s = {self.state.settings.abandon_s:g}"
            else:
                wakes.append(until)


class RunStart:
    """How a run comes by its first parameters, and begins: one learner is asked for version 0.

    Rules kept here, each with its test: the first that comes is asked, but one that has adopted a global model goes
    before one with weights of its own, while nothing of these has come; version 0 is durable before anyone adopts it;
    when that one is gone, or sends nothing more (`UploadWait`), whatever it sent is discarded and the next
    is asked. It alone goes on with its own weights, as version 0 (rounded, with `initial_codec`): a process that was
    restarted under its name fetches like everybody else. Once all of it is there, the run begins when as many learners
    are there as it is meant for, or `wait_for_learners_s` later: until then nobody trains, so that the first rounds
    have everybody in them and the run's step is that of everybody. Training begins once those that are there hold
    version 0 (beginning.py).
    """

    def __init__(self, state: SyncerState, cuts: Cuts, beginning: Beginning) -> None:
        self.state, self.cuts, self.beginning = state, cuts, beginning
        self._uploader: str | None = None
        self._uploader_session = ""
        """Which process of that name was asked. A restarted one has other weights under the same name."""
        self._uploader_holds = False
        """It has adopted a global model."""
        self._upload = UploadWait()
        self._whole_at: float | None = None
        """Since when all of the first parameters are there."""
        self._loss = 0.0
        """Relative error of their rounding."""

    def consider_uploader(self, hello: Hello) -> None:
        """One more that could be asked."""
        if self.state.phase == "empty" and self._whole_at is None and self._is_better(hello):
            self._uploader, self._uploader_session = hello.learner, hello.session
            self._uploader_holds = _holds_a_model(hello)
            self._upload.restart_wait()

    def asks_for_upload(self, learner: KnownLearner) -> bool:
        """Whether this one is to give the first parameters."""
        return self.state.phase == "empty" and self._uploader == learner.name and self._whole_at is None

    def replace_lost_uploader(self, learner: KnownLearner) -> KnownLearner | None:
        """This one is gone; who is asked in its place, and has to be told."""
        return self._ask_next() if self.asks_for_upload(learner) else None

    def note_upload(self, now: float, uploader: str, size: int) -> None:
        """See `UploadWait.note_bytes`."""
        if uploader == self._uploader:
            self._upload.note_bytes(now, size)

    def replace_overdue_uploader(self, now: float, wakes: list[float]) -> KnownLearner | None:
        """Who sends nothing more has had its chance, if another is there: that one is asked, and has to be told."""
        there = {one.name for one in self.state.members.connected_learners()}
        if self.state.phase != "empty" or self._uploader is None or self._whole_at is not None or len(there) < 2:
            return None
        next_uploader, until = None, self._upload.wait_until(now)
        if now >= until:
            text = f"{self._uploader} was asked for the first parameters, and nothing new of them came"
            self.state.out.note("warning", text, self.state.members.learners[self._uploader])
            self._upload.note_gave_up(self._uploader, there)
            next_uploader, until = self._ask_next(), self._upload.wait_until(now)
        wakes.append(until)
        return next_uploader

    def _ask_next(self) -> KnownLearner | None:
        """What the last one sent is discarded. Those that had their chance come last."""
        candidates = sorted(
            self.state.members.connected_learners(), key=lambda one: (one.name in self._upload.tried, one.joined_at)
        )
        self._uploader, self._uploader_holds = None, False
        self._upload.restart_wait()
        if not candidates:
            return None
        chosen = candidates[0]
        self._uploader, self._uploader_session = chosen.name, chosen.session
        self.state.out.note("warning", f"{chosen.name} is asked for the first parameters instead", chosen)
        return chosen

    def note_upload_done(self, now: float, uploader: str, session: str, loss: float = 0.0) -> None:
        """All first parameters have arrived from this process. What one sent that had the name before is no use.
        `loss`: relative error of their rounding."""
        asked = (uploader, session) == (self._uploader, self._uploader_session)
        if self.state.phase != "empty" or not asked or self._whole_at is not None:
            return
        self._whole_at, self._loss = now, loss
        settings = self.state.settings
        if settings.wait_for_learners_s and self.missing_learners:
            some, wait_s = f"{self.missing_learners} more of {settings.learners} learners", settings.wait_for_learners_s
            text = f"waiting for {some}, up to {wait_s:g} s; then training begins"
            self.state.out.note("waiting", text, missing=self.missing_learners, seconds=wait_s)

    @property
    def missing_learners(self) -> int:
        """Learners that the run is meant for and that are not here."""
        return max(0, self.state.settings.learners - len(self.state.members.connected_learners()))

    @property
    def awaited_learners(self) -> int:
        """So many of them are waited for: all else that training needs is here."""
        return self.missing_learners if self.state.phase == "empty" and self._whole_at is not None else 0

    def start_if_ready(self, now: float, wakes: list[float]) -> None:
        """Begin, where everybody is here or was waited for."""
        if self.state.phase != "empty" or self._whole_at is None:
            return
        settings = self.state.settings
        until = self._whole_at + settings.wait_for_learners_s
        if self.missing_learners and now < until:
            wakes.append(until)
            return
        if self.missing_learners and settings.wait_for_learners_s:
            some = f"{self.missing_learners} of {settings.learners} learners"
            self.state.out.note("warning", f"{some} did not come in time: training begins, and they may come later")
        self._start_run(now)

    def _start_run(self, now: float) -> None:
        uploader = self._uploader
        assert uploader is not None, "the first parameters are somebody's"
        self.cuts.take_first()
        self.state.out.persist(StartedRecord(uploader))
        self.state.enter_phase("running")
        self.state.versions = [0] * len(self.state.versions)
        text = f"{uploader} gave the first parameters"
        if self._loss:
            lossy = f"relative error {self._loss:.2e} (norm of the difference / norm)"
            self.state.out.note("initial", f"{text}, rounded to bf16: {lossy}", relative_error=self._loss)
        else:
            self.state.out.note("initial", text)
        # The uploader goes on with its own weights. One that was restarted since has other weights: it fetches.
        owner = self.state.members.learners[uploader]
        same_process = owner.session == self._uploader_session
        started = Started(uploader=uploader if same_process else "", gathering=self.state.gathering_round)
        for learner in self.state.members.connected_learners():
            self.state.out.send(learner.name, started)
        self.beginning.hold_back(now, owner if same_process else None)

    def _is_better(self, hello: Hello) -> bool:
        goes_before = _holds_a_model(hello) and not self._uploader_holds and not self._upload.begun
        return self._uploader is None or (goes_before and hello.learner not in self._upload.tried)


def _holds_a_model(hello: Hello) -> bool:
    return bool(hello.versions) and min(hello.versions) >= 0


UPLOAD_S = 60.0
"""An uploader that finishes no new fragment for this long is replaced; it has more time for large fragments."""
UPLOAD_RATE = 32 * 1024
"""Bytes a second: its largest fragment's bytes over this rate are added to `UPLOAD_S`. Half of a body's lowest rate."""


class UploadWait:
    """How long whoever is asked for the first parameters has for them: as long as fragments keep coming.

    A large model over a slow link takes hours, and may. But nothing begins before version 0 is there, so one that is
    asked and sends nothing, or never comes to the end of a fragment, would hold up the run for good: then the next
    joiner is asked. Where there is no other, there is nothing to gain, and it keeps its turn until one comes.
    """

    def __init__(self) -> None:
        self.begun = False
        """Something of it has come, or is coming."""
        self.tried: set[str] = set()
        """Those that had their chance: they are asked again only when there is nobody else."""
        self._since: float | None = None
        self._size = 0

    def restart_wait(self) -> None:
        """Somebody is asked, from now on."""
        self.begun, self._since, self._size = False, None, 0

    def note_gave_up(self, uploader: str, there: set[str]) -> None:
        """Once all have had their chance, it begins anew, with the others first."""
        self.tried = self.tried | {uploader} if there - self.tried - {uploader} else {uploader}

    def note_bytes(self, now: float, size: int) -> None:
        """A fragment of so many bytes begins to come; 0: one that was not there before is whole."""
        self.begun, self._size = True, max(self._size, size)
        if not size:
            self._since = now

    def wait_until(self, now: float) -> float:
        self._since = now if self._since is None else self._since
        return self._since + UPLOAD_S + self._size / UPLOAD_RATE


def wrong_hello(hello: Hello, run: str, fragments: int) -> str | None:
    """A learner holds a version of every fragment of this run, or of none; versions of other runs are not checked."""
    if hello.tokens_per_step < 0:
        return f"a hello with {hello.tokens_per_step} tokens per step"
    if hello.run != run or len(hello.versions) in (0, fragments):
        return None
    return f"a hello with versions of {len(hello.versions)} fragments in a run of {fragments}"
