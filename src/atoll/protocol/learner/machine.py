"""The learner's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

It runs in the courier beside the training process: it reports steps, says which fragment to copy at the coming
boundary, answers pulls from those copies, and hands new versions over to be adopted between two steps. In an
asynchronous run training never waits; in a synchronous run this file also says at which step to wait for which round.

connection.py knows whom it listens to, what it may report and when it saves for a snapshot; copies.py which fragments
it copies, when, and what it answers to a pull; versions.py what it holds of the run; peer_state.py how a newcomer takes
a peer's inner optimizer. This file handles the syncer's messages, adoption and the end of a run.

Rules kept here, each with its test: nothing is contributed from a fragment that was not adopted from this run, nor
before a peer's state is taken or known not to come; a copy dies with the adoption of its fragment; a run of another
name makes it forget what it held, and so does an incarnation that changed while it was away; before training begins it
holds the training process back, until the syncer says `TrainingBegins` or a later welcome asks for no wait.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from atoll.protocol import messages as msg
from atoll.protocol.absence import describe_outcome, find_outcome
from atoll.protocol.clock import SYNCER
from atoll.protocol.effects import Note, Tick
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.connection import ConnectionState, Counters, Marker, progress_of
from atoll.protocol.learner.copies import Copies, Orders, Pulls, Standing
from atoll.protocol.learner.peer_state import Helping, Seeking
from atoll.protocol.learner.versions import Versions
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import RankBoxes
from atoll.protocol.settings import Settings
from atoll.protocol.succession import Holder
from atoll.protocol.tape import Spoken

MOST_RULES = 16
"""So many changes of settings are remembered: a version on its way may be from before them."""
LearnerPhase = Literal["out", "joining", "training", "ending", "finished"]


class LearnerMachine:
    def __init__(
        self,
        name: str,
        session: str,
        tensors: tuple[msg.TensorSpec, ...],
        data: str = "",
        *,
        restored: bool = False,
        tokens_per_step: int = 0,
        holder: Holder | None = None,
        frozen: str = "",
        takes_frozen: bool = False,
        ranks: tuple[RankBoxes, ...] = (),
        unmerged: tuple[str, ...] = (),
        renamed: tuple[str, ...] = (),
    ) -> None:
        """`restored`: its inner optimizer comes from what this learner saved, so it seeks none when it joins. `holder`:
        who has this name, and by what it is proved. `frozen`: a digest of what it does not merge; where it is not the
        run's, `takes_frozen` has it seek a peer's. `ranks`: what each of them holds; empty: it has one. `unmerged`,
        `renamed`: names of tensors, as in a hello."""
        self.name, self.session = name, session
        self._holder = holder or Holder(session)
        self.phase: LearnerPhase = "out"
        self.settings = Settings()
        self._rules: deque[tuple[int, str]] = deque(maxlen=MOST_RULES)
        """(round, rule), in order: versions of rounds before this one are adopted by this rule. All later ones go by
        the settings."""
        self.keeps_feedback = False
        """Whether what answers leave out is kept, as the run's codec needs it: then it says what became of them."""
        self.wake_at: float | None = None
        self._tensors, self._data, self._restored, self._declared = tensors, data, restored, tokens_per_step
        self._frozen, self._takes_frozen, self._run_frozen = frozen, takes_frozen, ""
        self._ranks = ranks
        self._unmerged, self._renamed = unmerged, renamed
        self._may_be_torn = False
        """Of several ranks: some may have adopted a version that others have not when all was forgotten."""
        self._data_of: fx.Registered | None = None
        self._effects: list[fx.LearnerEffect] = []
        self._counters = Counters()
        self._connection = ConnectionState(self._do, self._counters, name, session)
        self._marker = Marker(self._do)
        self._orders = Orders(self._do)
        self.ways = Ways()
        self._versions = Versions(self._do, ways=self.ways)
        self._copies = Copies(self._do)
        self._pulls = Pulls(
            self._do, self._connection.send_message, self._standing, self._orders, self._copies, self._versions
        )
        self._seeking = Seeking(self._do, self._connection.send_message)
        self._helping = Helping(self._do, self._connection.send_message, self._versions)
        self._final: tuple[int, ...] | None = None
        self._held_back = False
        """Whether training has not begun, as the syncer's last welcome said."""
        self._lacking_bytes = 0
        """Bytes of the run's parameters that have not arrived yet."""
        self._starting = False
        """Whether the training process is in its first step and uses the processor."""

    # ---- read by the service ----------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        return self._connection.run

    @property
    def term(self) -> int:
        return self._connection.term

    @property
    def incarnation(self) -> int:
        return self._connection.incarnation

    @property
    def t(self) -> int:
        return self._counters.t

    @property
    def versions(self) -> list[int]:
        """Adopted, per fragment."""
        return self._versions.held

    @property
    def newest(self) -> list[int]:
        """Announced, per fragment."""
        return self._versions.newest

    @property
    def recovered(self) -> bool:
        return self._versions.is_complete and not self._seeking.open

    @property
    def fetches_parameters(self) -> bool:
        """Whether this learner joins a run that has parameters."""
        return self.phase == "joining" and self._connection.connected and min(self.newest, default=-1) >= 0

    @property
    def _may_train(self) -> bool:
        return self.recovered and not self._held_back

    @property
    def _stepping(self) -> bool:
        """More boundaries will come."""
        return self.phase == "training" and not self._counters.last.stopped

    def _standing(self) -> Standing:
        return Standing(self.t, self._counters.last.steps, self._stepping, self.recovered)

    def restore(
        self,
        run: str,
        versions: list[int],
        stepped: fx.Stepped,
        incarnation: int = 0,
        counted: list[int] | None = None,
        *,
        seeking: bool = False,
        term: int = 0,
    ) -> None:
        """What the shared memory and the training process say, for a courier that takes over from a dead one."""
        self._connection.run, self._connection.incarnation, self._connection.term = run, incarnation, term
        self._versions.held = list(versions)
        self._versions.counted = list(versions if counted is None else counted)
        self._seeking.open = seeking
        self._counters.last = stepped

    def hello(self) -> msg.Hello:
        self._connection.hello_t = self.t
        return msg.Hello(
            protocol=msg.PROTOCOL,
            learner=self.name,
            session=self.session,
            run=self.run,
            versions=tuple(self.versions),
            incarnation=self.incarnation,
            t=self.t,
            tensors=self._tensors,
            data=self._data,
            tokens_per_step=self._declared,
            tokens_total=self._counters.last.tokens_total,
            host=self._holder.host,
            pid=self._holder.pid,
            proof=self._holder.proof,
            frozen=self._frozen,
            ranks=self._ranks,
            unmerged=() if self.run else self._unmerged,
            renamed=() if self.run else self._renamed,
            clock=self._connection.clock,
            term=self.term,
        )

    def make_goodbye(self, reason: str) -> list[msg.FromLearner]:
        """What is said last when its training process goes. Before the welcome to a new connection nothing is reported,
        and nobody asks again: so what became of its steps since the last report goes along with the goodbye. That
        report names its incarnation, and a syncer that has given it another one passes the report over."""
        words: list[msg.FromLearner] = [msg.Leave(reason=reason)]
        if not self._connection.connected and self.versions and self._counters.are_consistent:
            # Without its tape: how much of that the syncer has, only the welcome would tell.
            words.insert(0, self._progress(offer=-1, aims=-1, tape=Spoken()))
        return [msgspec.structs.replace(word, clock=self._connection.clock, term=self.term) for word in words]

    def handle(self, now: float, event: fx.LearnerEvent) -> list[fx.LearnerEffect]:
        match event:
            case fx.Arrived(message):
                self._hear_message(now, message)
            case fx.Disconnected(reason, of):
                self._lose_connection(now, reason, of)
            case fx.Stepped():
                self._starting = self._starting and event.t <= self.t
                self._counters.take_step(event)
                self._pulls.pass_boundary()
                self._send_report(now)
            case fx.Told(first, entries):
                self._connection.tape.add(first, entries)  # the next report carries them
            case fx.Registered():
                self._data_of = event
                self._register_data(now)
            case fx.Copied():
                if self._pulls.take_copy(now, event) and event.t <= self.t:
                    self._send_report(now)  # otherwise the report of that step is on its way, and says both
                self._pulls.order_waited_for(event.t + 1)
            case fx.Adopted():
                self._take_adoption(now, event)
            case fx.Fetched(fragment, version):
                self._versions.measure_way(fragment, event.nbytes, event.seconds, event.latency_s)
                self._order_adoption(fragment, version)
                self._fetch_missing()
            case fx.Arriving():
                self._versions.way_is_free = True
                self._fetch_missing()
            case fx.Lacking(nbytes):
                self._note_lacking(now, nbytes)
            case fx.FirstStep(uses_cpu):
                changed, self._starting = uses_cpu != self._starting, uses_cpu
                if changed:
                    self._send_report(now)
            case fx.FetchFailed(fragment, reason):
                self._versions.retry_later(now, fragment)
                self._fetch_missing()
                self._note("warning", f"fragment {fragment} could not be fetched: {reason}; trying again")
            case fx.Uploaded():
                self.ways.up.add(event.nbytes, event.seconds)
                self._pulls.note_delivered(now, event)
            case fx.UploadFailed(number, _, reason):
                self._note("warning", f"the answer to round {number} did not arrive: {reason}")
                self._pulls.note_undelivered(now, event)
                self._fetch_missing()
            case fx.Saved():
                self._connection.send_message(now, self._marker.answer(event, self.incarnation))
            case fx.Captured():
                self._helping.take_copy(now, event)
            case fx.StateCame() | fx.StateFailed() | fx.Taken():
                if isinstance(event, fx.Taken) and not event.reason and self._seeking.frozen:
                    self._frozen = self._run_frozen
                self._seeking.note_outcome(now, event)
                self._train_if_recovered()
                self._send_report(now)
            case Tick():
                pass
        self._seeking.tell_outcome()  # after the orders it needs for its next step
        self._advance_time(now)
        effects, self._effects = self._effects, []
        return effects

    # ---- messages ---------------------------------------------------------------------------------------------

    def _hear_message(self, now: float, message: msg.FromSyncer) -> None:
        if self._connection.accepts_message(message):
            ended = self.phase == "ending" and self.recovered
            training = ended or self.phase == "training"
            self._marker.look_for_cut(message, training=training, incarnation=self.incarnation)
            self._route_message(now, message)

    def _route_message(self, now: float, message: msg.FromSyncer) -> None:
        match message:
            case msg.Welcome():
                self._take_welcome(now, message)
            case msg.Started(uploader=uploader):
                self._take_start(now, uploader)
            case msg.TrainingBegins(reason=reason):
                self._begin_training(reason)
                self._send_report(now)
            case msg.Lease(ranges=ranges, over=over, own=own, incarnation=incarnation):
                if incarnation == self.incarnation:  # else it was meant for another life under this name
                    self._do(fx.Supply(ranges, over, own))
            case msg.Pull():
                self._pulls.answer_pull(now, message)
                self._pulls.move_on(message.gathering)
            case msg.Announce():
                self._take_announcement(now, message)
            case msg.RoundShare(share=share, reason=reason):
                self._take_share(share, reason)
            case msg.SettingsChanged():
                self._change_settings(message)
            case msg.Recover(incarnation=incarnation, reason=reason):
                self._connection.incarnation = incarnation
                self._recover_from_run(now, reason, reset=True)
                if not self._ranks:
                    self._seeking.begin_seeking(now, self._connection.rounds_heard)
                self._fetch_missing()
                self._register_data(now)
            case msg.Help(ticket=ticket) if self._ranks:
                reason = "a learner of several ranks gives no state to others"
                self._connection.send_message(now, msg.Unable(ticket=ticket, reason=reason))
            case msg.Help() | msg.Stream() | msg.Release():
                self._helping.hear_request(now, message)
            case msg.Helped() | msg.Fresh():
                self._seeking.hear_answer(message)
                self._train_if_recovered()
                self._send_report(now)
            case msg.Drain(reason=reason):
                self._do(fx.AskToLeave(reason))
            case msg.Ending(reason=reason):
                self._begin_ending(reason)
            case msg.Finish(reason=reason, versions=versions):
                self._begin_ending(reason)
                self._final = versions
                self._versions.newest = list(versions)
                self._versions.given.clear()
                self._fetch_missing()
                self._finish_if_done(now)
            case msg.Refused(reason=reason, final=True, over=over):
                self.phase = "finished"
                self._do(fx.Stop(reason, final=True, failed=not over))
            case msg.Refused():
                self._note("warning", message.reason)

    def _take_welcome(self, now: float, welcome: msg.Welcome) -> None:
        before, self._connection.incarnation = self.incarnation, welcome.incarnation
        back = self._describe_return(now, welcome, before)
        self._connection.connected = True
        self._orders.share = 1.0
        self._connection.tape.welcomed(welcome.taped)
        self.settings = self._orders.settings = welcome.settings
        self._rules.clear()
        self._held_back = welcome.waits
        if welcome.waits:
            self._do(fx.HoldBack())
        new_run = self.run != welcome.run or len(self.versions) != len(welcome.versions)
        keeps_optimizer = self.run in welcome.succeeds
        if new_run:
            self._change_run(now, welcome)
        elif before not in (0, welcome.incarnation):
            self._recover_from_run(now, "its life was closed while the connection was down", reset=welcome.reset)
        elif any(held > newest for held, newest in zip(self.versions, welcome.versions, strict=True)):
            self._recover_from_run(now, "the run went back to what its disk had kept", reset=False)
        new_life = new_run or before not in (0, welcome.incarnation)
        self._seek_peer_state(now, welcome, new_life=new_life and not keeps_optimizer)
        self._versions.take_welcome(welcome)
        self._settle_merged(welcome)
        if welcome.leases:
            self._do(fx.Supply(welcome.leases))
        self._register_data(now)
        self._orders.gathering = max(welcome.gathering, 0)
        if self.phase not in ("ending", "finished"):
            self.phase = "training" if self._may_train else "joining"
        self._do(fx.Inform(welcome.progress, welcome.global_step, welcome.committed))
        if welcome.upload:
            self._do(fx.UploadAll())
        self._keep_up(welcome.committed - 1)
        for number in range(max(0, welcome.committed - len(self.newest)), welcome.committed):
            if not self._versions.lacks_newest(number % len(self.newest)):
                self._pulls.pass_over_round(number)
        self._fetch_missing()
        self._pulls.plan_copies()
        self._send_report(now)
        if not welcome.waits and self.t == 0:
            self._begin_training("")  # an earlier term, or a courier that died, may have held the training process back
        if back:
            self._note("connected", back)

    def _describe_return(self, now: float, welcome: msg.Welcome, before: int) -> str:
        """Return what becomes of the steps that it made while it was cut off; empty: it was not."""
        if (lost := self._connection.lost) is None:
            return ""
        self._connection.lost = None
        away_s, lost_t, back_t = now - lost[0], lost[1], self.t
        if welcome.away_s:  # the figures of the syncer's own event
            away_s, lost_t, back_t = welcome.away_s, welcome.away_t, self._connection.hello_t
        again = f"connected again after {away_s:.1f} s"
        if self.run != welcome.run or (steps := back_t - lost_t) <= 0:
            return again
        if before not in (0, welcome.incarnation):
            why = f" ({welcome.closed})" if welcome.closed else ""
            return f"{again}; its life was closed meanwhile{why}: none of the {steps:,} steps made since counts"
        given = [t - lost_t for _, t, _ in welcome.merged] or [0] * len(self.versions)
        behind = [held < newest for held, newest in zip(self.versions, welcome.versions, strict=True)]
        adopt = welcome.settings.resolved_adopt
        outcome = describe_outcome(find_outcome(steps, given, behind, adopt), adopt)
        return f"{again}. Of the {steps:,} steps made meanwhile {outcome}"

    def _begin_training(self, reason: str) -> None:
        """Let the training process make its first step, after its next orders are on their way to it."""
        self._held_back = False
        self._train_if_recovered()
        self._do(fx.BeginTraining(reason))

    def _note_lacking(self, now: float, nbytes: int) -> None:
        changed, self._lacking_bytes = nbytes != self._lacking_bytes, nbytes
        if changed and self.fetches_parameters:
            self._send_report(now)

    def _settle_merged(self, welcome: msg.Welcome) -> None:
        """What was merged meanwhile. A round that is being merged may still bring more."""
        if self.keeps_feedback:
            least = welcome.least or (-1,) * len(welcome.merged)
            for fragment, ((version, t, _), rolled_back) in enumerate(zip(welcome.merged, least, strict=True)):
                self._do(fx.Settle(fragment, version, t if version > rolled_back else -1))

    def _seek_peer_state(self, now: float, welcome: msg.Welcome, *, new_life: bool) -> None:
        """A life that begins in a running run takes a peer's inner optimizer, unless it has its own saved one. Before
        the first committed round there is nothing to take. Frozen parameters that differ from the run's are sought in
        either case (`_takes_frozen`). A learner of several ranks takes nothing: no peer has the state of its ranks."""
        self._run_frozen = welcome.frozen
        if self._ranks:
            return
        lacks = self._takes_frozen and welcome.frozen not in ("", self._frozen)
        if self._seeking.open or (new_life and not self._restored) or lacks:
            if (welcome.committed > 0 or lacks) and self.phase not in ("ending", "finished"):
                self._seeking.begin_seeking(now, welcome.committed, frozen=lacks)
            else:
                self._seeking.stop_seeking("the run has only begun: every inner optimizer is fresh")
        self._restored = False

    def _train_if_recovered(self) -> None:
        """Begin to contribute, if the run's parameters are there, no peer's state is to come and training has begun."""
        if self.phase == "joining" and self._may_train:
            self.phase = "training"
            self._pulls.plan_copies()

    def _change_run(self, now: float, welcome: msg.Welcome) -> None:
        if self.run in welcome.succeeds:
            text = f"run {welcome.run} goes on for run {self.run}, whose disk was lost: joining it as a newcomer, with"
            self._note("warning", f"{text} its own inner optimizer; steps that run {welcome.run} lacks are dropped")
        elif self.run:
            self._note("warning", f"this is run {welcome.run}, not {self.run}: its parameters are taken")
        self._connection.run, self._connection.rounds_heard = welcome.run, welcome.clock.get(SYNCER, 0)
        self._forget_run(now, "a new run", fragments=len(welcome.versions), reset=False)

    def _take_start(self, now: float, uploader: str) -> None:
        self._versions.newest = [max(version, 0) for version in self.newest]
        if uploader != self.name or self._may_be_torn:
            self._fetch_missing()
            if self._lacking_bytes:
                self._send_report(now)
            return
        self._versions.held, self._versions.counted = [0] * len(self.newest), [0] * len(self.newest)
        if self.phase == "joining" and not self._held_back:
            self.phase = "training"
        self._pulls.plan_copies()
        self._do(fx.Own())
        self._send_report(now)

    def _take_announcement(self, now: float, announce: msg.Announce) -> None:
        mine = [m for m in announce.members if m.learner == self.name and m.incarnation == self.incarnation]
        self._versions.take_announcement(announce, mine[0] if mine else None)
        if self.keeps_feedback:
            if mine or announce.restored:
                self._do(fx.Settle(announce.fragment, announce.version, mine[0].t if mine else -1))
            self._do(fx.DropRests(announce.fragment))
        self._do(fx.Inform(announce.progress, announce.global_step, announce.round + 1))
        self._copies.forget_round(announce.fragment, announce.round)
        self._pulls.move_on(announce.gathering)
        if self._keep_up(announce.round):
            self._pulls.plan_copies()
            self._send_report(now)
        if not announce.members:
            self._pulls.pass_over_round(announce.round)
        self._fetch_missing()

    def _begin_ending(self, reason: str) -> None:
        if self.phase in ("training", "joining"):
            self.phase = "ending"
            self._seeking.stop_seeking("the run ends: no peer's inner optimizer is needed any more")
            self._orders.pending.clear()
            self._do(fx.Stop(reason))
            self._versions.fetch_all()
            self._fetch_missing()  # a learner with a share of the rounds has passed over some versions

    def _lose_connection(self, now: float, reason: str, of: Literal["syncer", "relay", ""]) -> None:
        is_news = self._connection.note_lost(now, reason)
        self._copies.forget_pulls()
        self._helping.forget_requests()
        if self._final is not None:
            self._stop_for_good("the run is over")
        elif self.phase != "finished" and is_news:
            peer = {"syncer": "the syncer", "relay": "its relay"}.get(of)
            lost = f"{peer} is out of reach ({reason})" if peer else reason
            self._note("warning" if peer else "relay", f"{lost}; training goes on")

    # ---- its place in the run -----------------------------------------------------------------------------------

    def _keep_up(self, number: int) -> bool:
        """Synchronous: a learner that the run has gone past takes its place anew, and waits for nothing older."""
        if self.phase != "training" or not self._orders.is_behind(number):
            return False
        self._orders.forget_all()
        return True

    # ---- new versions -------------------------------------------------------------------------------------------

    def _fetch_missing(self) -> None:
        if self._connection.connected:
            self._versions.fetch_missing(self._orders.gathering, owed_only=self._takes_owed_only)

    @property
    def _takes_owed_only(self) -> bool:
        """Whether to fetch only versions that hold own steps, because the way down has no room for others."""
        return self._orders.share < 1.0 and self.phase == "training"

    def _take_share(self, share: float, reason: str) -> None:
        self._note("share", reason)
        if share == 1.0 and self._takes_owed_only:
            self._versions.pass_over_missing()
        self._orders.share = share
        self._pulls.plan_copies()
        self._fetch_missing()

    def _order_adoption(self, fragment: int, version: int) -> None:
        """By the rule of the version's round; overwrite while it recovers, once the run is finished, and across a
        rollback. `copy_t` is the step of the own copy that the version contains and what is held does not (None: there
        is none), `held_tokens` the own tokens in it that the counters still count as not merged: they are not
        dropped."""
        if not self._versions.take_fetched(fragment, version):
            return
        number = self._versions.rounds.get(fragment, -1)
        if self.settings.synchronous:
            self._before_adoption(fragment, number)
        plain = not self.recovered or self._final is not None or self._versions.replaces_all(fragment, version)
        adopt = fx.Adopt(
            fragment=fragment,
            version=version,
            round=number,
            rule="overwrite" if plain else self._rule_of(number),
            step=self._orders.adopt_step(number) if self.phase == "training" else 0,
            copy_t=self._versions.copy_in(fragment, version),
            held_tokens=self._versions.tokens_in(fragment, version),
        )
        self._may_be_torn = bool(self._ranks)
        self._do(adopt)

    def _rule_of(self, number: int) -> str:
        """How the version of a round is adopted: by the settings that it was frozen under. A welcome tells only the
        present ones: what was missed before it goes by those."""
        return next((rule for until, rule in self._rules if number < until), self.settings.adopt)

    def _change_settings(self, changed: msg.SettingsChanged) -> None:
        self._rules.append((changed.since, self.settings.adopt))
        self.settings = self._orders.settings = changed.settings

    def _before_adoption(self, fragment: int, number: int) -> None:
        """The training process goes on once it has adopted: its next orders must be there before."""
        if self.phase == "training":
            self._orders.plan_copies(max(number, 0) + 1)
        elif self.phase == "joining" and self._versions.complete_with(fragment) and not self._seeking.open:
            if self._held_back:
                return
            self.phase = "training"
            self._pulls.plan_copies()

    def _take_adoption(self, now: float, event: fx.Adopted) -> None:
        fragment = event.fragment
        if (number := self._versions.take_adoption(fragment, event.version)) is None:
            return
        self._orders.note_adoption(fragment, number)
        self._orders.void_copy(self._copies.drop_copy(fragment))
        self._counters.take_adoption(event)
        self._train_if_recovered()
        self._fetch_missing()
        self._finish_if_done(now)
        if self.phase != "finished":
            self._send_report(now)

    def _recover_from_run(self, now: float, reason: str, *, reset: bool) -> None:
        fresh = " and an inner optimizer" if reset else ""
        self._note("recovering", f"taking the run's parameters{fresh} anew: {reason}")
        self._forget_run(now, reason, fragments=len(self.versions), reset=reset)

    def _forget_run(self, now: float, reason: str, *, fragments: int, reset: bool) -> None:
        self._helping.forget_copies(now, "it starts over itself")
        self._copies.forget_all()
        self._orders.forget_all()
        # It may be in the middle of a step, also while it joins, since training does not wait: then nothing is reported
        # until it answers ForgetVersions. It begins to train once it has adopted everything, which it may have by now.
        in_a_step = self.phase == "training" or self.t > 0 or self._versions.may_be_complete
        self._versions.forget_all(fragments)
        self._counters.forget_life(fragments, in_a_step=in_a_step)
        if self.phase == "training":
            self.phase = "joining"
        self._do(fx.ForgetVersions(reason, reset))

    # ---- the end and small things -------------------------------------------------------------------------------

    def _finish_if_done(self, now: float) -> None:
        if self._final is None or self.phase == "finished":
            return
        if all(held >= final for held, final in zip(self.versions, self._final, strict=True)):
            self._send_report(now)
            self._connection.send_message(now, msg.Leave(reason="the run is over"))
            self._stop_for_good("the run is over")

    def _stop_for_good(self, reason: str) -> None:
        if self.phase != "finished":
            self.phase = "finished"
            self._do(fx.Stop(reason, final=True))

    def _advance_time(self, now: float) -> None:
        wakes: list[float] = []
        if self._helping.is_helping:
            self._helping.serve_newcomers(now, able=self._stepping and self.recovered)
            wakes += self._helping.wake_times
        if retries := self._versions.retry_at:
            for fragment in [f for f, at in retries.items() if now >= at]:
                del retries[fragment]
                self._fetch_missing()
            wakes += retries.values()
        self._connection.send_heartbeat(now, self.settings.heartbeat_s, wakes)
        self.wake_at = min(wakes, default=None)

    def _register_data(self, now: float) -> None:
        if (data := self._data_of) is not None:
            self._connection.send_message(
                now, msg.Register(datasets=data.datasets, epochs=data.epochs, batch=data.batch)
            )

    def _send_report(self, now: float) -> None:
        if not self._connection.connected or not self.versions or not self._counters.are_consistent:
            return
        self._connection.send_message(
            now, self._progress(self._copies.offer, self._orders.next_round, self._connection.tape)
        )

    def _progress(self, offer: int, aims: int, tape: Spoken) -> msg.Progress:
        last, seeking = self._counters.last, self._seeking.open
        ways, lacking = self.ways, self._lacking_bytes
        report = progress_of(last, self._versions, ways, offer, aims, self.incarnation, seeking, tape, lacking)
        return msgspec.structs.replace(report, starting=True) if self._starting else report

    def _do(self, effect: fx.LearnerEffect) -> None:
        self._effects.append(effect)

    def _note(self, kind: str, text: str) -> None:
        self._do(Note(kind, f"{self.name}: {text}", {"learner": self.name}))
