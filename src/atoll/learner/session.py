"""A learner's session in a run: joining, what is due between two steps, leaving.

Between two steps the training process only counts, starts copies of fragments off the device and takes arrived ones in;
everything else happens in the courier beside it. No step waits for the network, the syncer or a peer, except in a
synchronous run, where waiting is what was asked for. If the courier dies another one is started; training goes on.
"""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from msgspec import structs

from atoll.learner.boundary import SharedMailbox
from atoll.learner.capture import BegunSnapshot, Stateful
from atoll.learner.courier_process import CourierProcess, TapeRecorder, describe_machine
from atoll.learner.data import Feed, NamedDataset
from atoll.learner.earlier import SavedPart, find_earlier_state, remember_feed
from atoll.learner.folder import LearnerFolder
from atoll.learner.joining import JoinRequest, JoinWait
from atoll.learner.meeting import AgreedFacts, RankExchange
from atoll.learner.peer_state_transfer import PeerOrder, PeerStates
from atoll.learner.ranks import DataShare, RankGroup, introduce_rank, rank_folder
from atoll.learner.saved_state import OwnState, Saver, describe_place
from atoll.learner.script import TRAINS_ON, LeaveRequest, LeaveWait, broken_off, patience_s, say
from atoll.learner.snapshot import Snapshot
from atoll.learner.step_stats import StepCounter
from atoll.learner.trained_model import TrainedModel, as_torch
from atoll.mailbox.channel import (
    DialFailed,
    ForgetOrder,
    Goodbye,
    GoOrder,
    JoinProgress,
    RunProgress,
    SettingsTold,
    Start,
    StepMissing,
    StepReport,
    StopOrder,
    ToTraining,
    Welcomed,
)
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Stepped
from atoll.protocol.tape import BeganEntry, ForgotEntry, InformedEntry, MarkedEntry, StoppedEntry, SuppliedEntry
from atoll.store.removal import finish_removals
from atoll.store.rundir import UNMERGED


class RunSession:
    def __init__(
        self,
        joining: JoinRequest,
        trained: TrainedModel,
        extras: Mapping[str, Stateful],
        from_peers: Collection[str] = (),
        *,
        folder: LearnerFolder,
        courier: CourierProcess,
        tally: StepCounter,
        feed: Feed,
        ranks: RankGroup | None = None,
    ) -> None:
        """`extras`: what the script registered; `from_peers`: the names of those that a newcomer takes from a peer;
        `folder`: where it saves its part of cuts, by the run."""
        self._joining, self._trained = joining, trained
        self._courier, self._tally, self._feed = courier, tally, feed
        self._session = secrets.token_hex(8)
        self._tape = TapeRecorder(courier)
        self.shared = SharedMailbox(trained, courier, self._tape, joining.placement, ranks)
        self._ranks = ranks
        self._leads = ranks is None or ranks.rank == 0
        self.data_share = DataShare() if ranks is None else as_torch(trained).find_data_share(ranks)
        self._unmerged = trained.find_unmerged(joining.frozen if ranks is None else "mine")
        shared = {name: thing for name, thing in extras.items() if name in from_peers}
        rest = [name for name in extras if name not in from_peers]
        self._own = OwnState(trained, extras)
        kept = (self._unmerged, rest, self._own.room)
        self._peers = PeerStates(trained, shared, courier, self._tape, *kept)
        feed.note_no_step = self._tell_no_step
        self._inputs = trained.watch_inputs(wanted=lambda: feed.position < 0)
        self._restored = False
        """Its inner optimizer comes from what this learner saved, and is put back once it has joined."""
        self._left_state: Path | None = None
        """What this learner saved on leaving, while it is the newest."""
        self._own_folder, self._folder, self._saver = folder, folder.path, Saver(folder.path)
        self._preemption = LeaveRequest()
        self._join_wait = JoinWait(joining, speaks=self._leads and not courier.replays)
        on = (self._carry_out, self._apply_agreed)
        self._exchange = RankExchange(ranks, courier.receive, lambda: self._preemption.asked, *on)
        self._until: int | None = 0 if courier.replays else None
        """Replay: the step at which it waits."""
        self._told: RunProgress | None = None
        """The newest that the courier said of the run."""
        self._known = RunProgress()
        """What the step under way goes by."""
        self._done = self._final = self._stopped = self._finished = False
        self._leave_wait: LeaveWait | None = None
        """How it waited for the end, once its last steps were given; None: it still trains for the run."""
        self._steps_after_end = 0
        self._script_told = False
        """A step has returned since the run's end was heard of, so the loop could have asked learner.done."""
        self._joined: str | None = None
        """The run whose parameters it has, once it said so."""
        self._succeeds: tuple[str, ...] = ()
        """Lost runs that this one goes on for."""

    @property
    def done(self) -> bool:
        """The run has ended, or this machine is taken away."""
        return self._done or self._exchange.leaving

    @property
    def steps_after_end(self) -> int:
        """Steps of a script that trains on after its last steps were given. No version, report or ledger has them."""
        return self._steps_after_end

    @property
    def trains_after_end(self) -> bool:
        """Whether the script's steps count for nothing any more."""
        return self._leave_wait is not None

    @property
    def finished(self) -> bool:
        """The final parameters are in the model."""
        return self._finished

    @property
    def has_budget(self) -> bool:
        boundary = self.shared.boundary
        return boundary is not None and (boundary.settings.steps > 0 or boundary.settings.tokens > 0)

    @property
    def learners(self) -> int:
        """That the run was begun with; 0 until it is heard of."""
        return 0 if self.shared.boundary is None else self.shared.boundary.settings.learners

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent; 0 until the run is heard of."""
        return min(1.0, self._known.progress)

    @property
    def global_step(self) -> int:
        return self._known.global_step

    # ---- joining ------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Begin as the run has it, or as an earlier life left it."""
        self._preemption.watch()
        self.shared.describe()
        if init := os.environ.get("ATOLL_INIT"):
            self._trained.load_weights(Path(init))
        self._join_wait.begin()
        run = self._find_run()
        self._use_folder_of(run)
        earlier = find_earlier_state(self._folder, run, self.shared.tensors, self._ranks, self.shared.boxes)
        self._restored, self._left_state = earlier is not None, earlier.left if earlier is not None else None
        if earlier is None and self._folder is not None:
            self._feed.find_earlier = remember_feed(self._folder, lambda: self._run)
        if earlier is not None and earlier.left is None:
            self._saver.note_life(earlier.file)
        if earlier is not None and self._folder is not None:
            self._unmerged.restore_saved(self._folder / UNMERGED)
        self._unmerged.describe()
        if earlier is not None and earlier.exact:
            self._restore_exactly(earlier.snapshot)
        self._courier.start()
        self._tape.add(self._began(earlier))
        self._introduce(sure=earlier is not None and earlier.exact)
        if gc.isenabled():
            # While the courier starts. What a compiler left behind takes Python a second to look through, and the next
            # objects that stay would make it do so in the middle of training.
            gc.collect()
        self._wait_until_joined()
        self._end_if_unjoined()
        if earlier is not None:
            self._put_back(earlier)
            self._restored = False
        elif self._ranks is not None and self._leads and self.shared.incarnation > 1:
            say("it has no snapshot yet: the inner optimizer and what the script registered begin anew")
        self._preemption.begun = True
        self._note_joined()
        self._look_up()

    def _put_back(self, earlier: SavedPart) -> None:
        if earlier.run and self._run and earlier.run not in (self._run, *self._succeeds):
            say(f"{earlier.file} in {self._folder} is of run {earlier.run}: the inner optimizer begins afresh")
            self._left_state = None  # that run may go on
            return
        try:
            place = self._own.restore_saved(earlier.snapshot)
        except Exception as error:
            if not isinstance(error, ConfigError) or not earlier.run:  # the script's own, or somebody asked for it
                self._drop_left_state()  # it would end every later process of this name as well
                raise
            say(f"{earlier.file} in {self._folder} does not fit, the inner optimizer begins afresh: {error}")
            return
        self._feed.load_stream(place["feed"])
        if self._leads:
            say(f"goes on with the inner optimizer, schedules and random states of step {place['t']}")

    @property
    def _run(self) -> str:
        """The run's name; empty until it is heard of."""
        return self.shared.box.run if self.shared.box is not None else ""

    def _find_run(self) -> str:
        """Empty: it is not known yet, or does not matter: a folder was named."""
        run = ""
        if not self._courier.replays:
            run = self._join_wait.find_run(lambda: self._preemption.asked, asks=self._own_folder.runs is not None)
            run = self._own_folder.find_successor(run)
        return run if self._ranks is None else self._ranks.share(run, str)

    def _use_folder_of(self, run: str) -> None:
        """Save into the folder of this run from now on. Nothing is being saved yet."""
        if self._ranks is not None:
            leads = self._ranks.rank == 0
            path = self._own_folder.enter_run(run) if leads and run else self._folder
            first = self._ranks.share(str(path or ""), str)
            if (own := rank_folder(first, self._ranks.rank)) != self._folder:
                self._folder, self._saver = own, Saver(own)
        elif run and (folder := self._own_folder.enter_run(run)) != self._folder:
            self._folder, self._saver = folder, Saver(folder)

    def _note_joined(self) -> None:
        """Once for each run: a learner that trains before it has the run's parameters joins later."""
        if self._joined != self._run and not self._courier.replays and self.shared.has_parameters():
            self._joined = self._run
            self._own_folder.note_successor(self._run, self._succeeds)
            self._use_folder_of(self._run)
            self._saver.enter_run(self._run)
            self._drop_left_state()
            self._join_wait.say_joined(self._run, 1 if self._ranks is None else self._ranks.size)

    def _drop_left_state(self) -> None:
        """From here on it saves its state anew when it is asked to leave, and the next cut is newer."""
        if self._left_state is not None:
            self._left_state.unlink(missing_ok=True)
            self._left_state = None

    def _restore_exactly(self, saved: Snapshot) -> None:
        """The same incarnation goes on: the courier finds its place in shared memory, as after a courier's death."""
        place = self._own.restore_exactly(saved)
        if place["learner"] != self._joining.name:
            raise ConfigError(f"the saved state is of {place['learner']}, this is {self._joining.name}")
        self._session = place["session"]
        self._tally.continue_from(place)
        self.shared.continue_from(place)
        self._feed.load(place["feed"])

    def _began(self, earlier: SavedPart | None) -> BeganEntry:
        file, exact = (earlier.file, earlier.exact) if earlier is not None else ("", False)
        began = describe_machine(self._tally.t, self._trained.device, file, exact)
        return began if self._ranks is None else structs.replace(began, ranks=self._ranks.size)

    def _introduce(self, *, sure: bool = False) -> None:
        """Send a new courier all that it needs."""
        who, boxed = self._joining, self.shared.boundary is not None
        unmerged = (self._unmerged.digest, self._unmerged.takes, self._unmerged.frozen_bytes)
        declared = who.tokens_per_step if self._ranks is None else 0  # tokens of other ranks are counted a step late
        known = (who.data, self._restored, declared, who.host, who.pid, who.proof, *unmerged)
        start = Start(who.name, self._session, who.url, self.shared.tensors, boxed, *known)
        start = structs.replace(start, unmerged=self._unmerged.names, renamed=self._unmerged.renamed)
        if self._ranks is None:
            self._courier.send(start)
        else:
            self._session = introduce_rank(self._ranks, self._courier, start, self.shared.boxes)
        self.shared.hand_to_courier(self._counted(), sure=sure, waits=self._peers.waits)
        if self._feed.registered is not None:
            self._courier.send(self._feed.registered)
        self._tape.send_all_entries()

    def _wait_until_joined(self) -> None:
        """Wait for the run's parameters and a peer's state; where they do not come in time, train without them, and
        take them when they do."""
        self._join_wait.give_courier_time()
        while self._until is not None and self._until <= self._tally.t and not self._final:
            self.wait(0.5)
        while self._exchange.agree(
            self._until is None and not self._final and not self._is_current() and not self._preemption.asked
        ):
            left_s = self._join_wait.left_s
            if self._exchange.agree(left_s <= 0):
                if self.shared.boundary is None:
                    self._join_wait.check_reached()
                self._join_wait.say_unjoined(has_parameters=self.shared.has_parameters())
                return
            self.wait(min(left_s, 0.5))
            self._join_wait.say_dialling()

    def _end_if_unjoined(self) -> None:
        """Where it was asked to leave. By a signal that has mostly happened already: its handler raises, which goes
        unheard in a destructor."""
        left = self._preemption.hurried or not self.shared.has_parameters()
        if self._exchange.agree(self._exchange.leaving and left):
            raise self._preemption.make_unjoined()

    def _is_current(self) -> bool:
        """Return whether this learner has the run's parameters and progress, and waits neither for a peer nor for the
        others' download of version 0. Once the run ends, it does not wait for the others."""
        waits = self._peers.waits or (self._join_wait.held_back and not self._done)
        return self.shared.has_parameters() and not waits and self._told is not None

    def ask_for_leases(self, found: tuple[NamedDataset, ...], batch_size: int, epochs: int, *, drop_last: bool) -> None:
        boundary = self.shared.boundary
        seed = boundary.settings.seed if boundary is not None else self._joining.seed
        size = batch_size * self.data_share.parts
        self._courier.send(self._feed.ask(found, size, epochs, seed, drop_last=drop_last))

    def _tell_no_step(self, batches: int) -> None:
        if self._leads and not self._courier.replays:
            asked = "does the script call learner.step() after every optimizer step?"
            say(f"{batches} batches were handed out and no step was made: {asked}")
            self._courier.send(StepMissing(batches))

    # ---- between two steps --------------------------------------------------------------------------------------

    def stepped(self, tokens: int, loss: torch.Tensor | float | None) -> None:
        """The script has made a step, and it is counted."""
        tally, shared = self._tally, self.shared
        self._feed.stepped()
        tally.add_loss(loss)
        self._inputs.stepped(tally.t)
        if self._ranks is None:
            self._unmerged.look(tally.t)
        if shared.boundary is not None:
            shared.boundary.count_step(tally.t, 0 if self._ranks else tokens, tally.tokens, self._feed.position)
        synchronous = shared.boundary is not None and shared.boundary.settings.synchronous
        self._exchange.exchange_facts(tokens if self.data_share.counts else 0, wait=synchronous)
        self._listen()
        if self.done:
            self._exchange.finish()  # the last copies know of all tokens
        if shared.boundary is not None:
            shared.boundary.adopt_ready(tally.t)
            self._tape.tell()
            shared.boundary.make_copies(tally.t)
            self._report()
            self._make_room()
            self._hold()
            self._note_joined()
            self._look_up()
        # A loop over batches that a loader had drawn before ends with them.
        if self._script_told and self._feed.waiting == 0:
            self._end_for_script()
        self._script_told = self._done

    def _end_for_script(self) -> None:
        """Give the last steps now, in the middle of a loop that goes on after the run's end. The syncer collects steps
        of learners that have stopped, and copies of a model that trains on would hold more steps than are counted."""
        if self._leads:
            say(TRAINS_ON)
        self._give_last_steps()

    def count_step_after_end(self) -> None:
        self._steps_after_end += 1

    def _make_room(self) -> None:
        if self._joined is not None and self.shared.box is not None:
            self._own.make_room(self.shared.box)

    def _hold(self) -> None:
        """Only a synchronous run ever holds, and a replay."""
        t, shared = self._tally.t, self.shared
        assert shared.boundary is not None
        may_hold = self._ranks is None or shared.boundary.settings.synchronous  # to ask the others is to wait for them
        while may_hold and self._exchange.agree(shared.boundary.is_held(t) and not self.done):
            self._courier.wait(self._exchange.pause_s(0.5))
            self._listen()
            shared.boundary.adopt_ready(t)
            shared.boundary.make_copies(t)  # ordered too late for this boundary: the round that it waits for needs it
            shared.boundary.settle()
        # A replay waits at this step, also once it was told to end: what its tape says next may be on its way.
        while self._until is not None and self._until <= t and not self._final:
            self.wait(0.5)

    def wait(self, seconds: float) -> None:
        """Not training: listen, and serve what is due. All ranks call it together."""
        self._courier.wait(self._exchange.pause_s(seconds))
        self._exchange.agree(False)
        self._listen()
        if self.shared.boundary is not None:
            self.shared.boundary.serve_orders()

    # ---- how far the run is -----------------------------------------------------------------------------------------

    def _apply_agreed(self, agreed: AgreedFacts, of_this_life: bool) -> None:
        """What the ranks of this learner agreed on; `of_this_life`: their tokens are."""
        self._tally.tokens += agreed.tokens
        if self.shared.boundary is not None:
            self.shared.boundary.add_tokens(agreed.tokens, of_this_life=of_this_life)
        self._told = agreed.progress or self._told
        if agreed.leaving:
            self._preemption.ask("another of its ranks was asked to leave")

    def _look_up(self) -> None:
        """How far the run is, as the next step is to know it. It does not change while that step is under way, whatever
        is heard meanwhile, and the tape records exactly these values."""
        if (told := self._told) is not None and told != self._known:
            self._known = told
            self._tape.add(InformedEntry(self._tally.t, told.committed, told.progress, told.global_step))

    def _report(self) -> None:
        """Counters go on counting: where the courier does not keep up, a later report says it all."""
        if self._stopped or self._until is not None or not self._courier.clogged:
            self._courier.send(StepReport(self._counted(), self.shared.boundary.epoch if self.shared.boundary else 0))

    def _counted(self) -> Stepped:
        rows = self.shared.counters()
        return Stepped(
            t=self._tally.t,
            steps=rows["steps"],
            tokens=rows["tokens"],
            tokens_total=self._tally.tokens,
            busy_s=round(self._tally.busy_s, 6),
            loss=self._tally.loss,
            stopped=self._stopped,
            dropped=rows["dropped"],
            missed=rows["missed"],
            position=self._feed.position,
            leaving=self._preemption.asked,
            inputs=self._inputs.number,
        )

    # ---- what the courier orders --------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._ranks is not None and not self._final and not self._courier.alive:
            raise RunFailed(f"the courier of rank {self._ranks.rank} died, and with it this learner: start it again")
        if not self._final and self._courier.restart_if_dead():
            say("the courier died; another one is started, training goes on")
            if self.shared.boundary is not None:
                self.shared.boundary.drop_orders()
            self._peers.courier_died()
            self._introduce()
            self._report()
        for frame in self._exchange.take_frames():
            self._carry_out(frame)
        for saved in self._saver.results():
            self._courier.send(saved)
        if self.shared.boundary is not None:
            self.shared.boundary.send_finished_copies()

    def _carry_out(self, frame: ToTraining) -> None:
        t = self._tally.t
        if isinstance(frame, PeerOrder):
            self._peers.carry_out(frame, t)
            return
        match frame:
            case Welcomed():
                self._join_wait.say_connected(frame)
                self._succeeds = frame.succeeds
                self._unmerged.compare(frame.frozen)
                if self.shared.apply_welcome(frame):
                    self.shared.hand_to_courier(self._counted())
            case SettingsTold(settings):
                if (boundary := self.shared.boundary) is not None:
                    boundary.settings = settings
            case RunProgress():
                self._told = frame
            case DialFailed():
                self._join_wait.note_failed_dial(frame)
            case JoinProgress():
                self._join_wait.note_progress(frame)
            case fx.HoldBack():
                self._join_wait.held_back = True
            case fx.BeginTraining(reason):
                self._join_wait.note_beginning(reason)
            case GoOrder(until):
                self._until = until
            case fx.AskToLeave(reason):
                self._preemption.ask(f"it was drained: {reason}")
            case StopOrder():
                self._stop(frame)
            case fx.Save(cut, kept):
                self._tape.add(MarkedEntry(t, cut))
                self._saver.take_part(cut, t, self._begin_capture, kept)
            case fx.Supply(ranges, over, own):
                self._tape.add(SuppliedEntry(t, tuple(one.lease for one in ranges), over, bool(own)))
                self._feed.take_leases(ranges, over, own)
            case _:
                assert self.shared.boundary is not None
                self.shared.boundary.carry_out(frame)
                if isinstance(frame, ForgetOrder):
                    self._forget(frame.reset)
                elif isinstance(frame, fx.Own):
                    self._saver.keep_unmerged(self._unmerged.capture)

    def _stop(self, order: StopOrder) -> None:
        if not self._done:
            self._tape.add(StoppedEntry(self._tally.t))
        self._done = True
        self._final = self._final or order.final
        if order.failed:
            raise ConfigError(order.reason) if order.mistake else RunFailed(order.reason)

    def _forget(self, reset: bool) -> None:
        self._tape.add(ForgotEntry(self._tally.t, reset))
        self._feed.forget()
        if reset and self._trained.reset_optimizer():
            say("the inner optimizer starts afresh")

    def _begin_capture(self) -> BegunSnapshot:
        box, boundary = self.shared.box, self.shared.boundary
        assert box is not None and boundary is not None
        place = describe_place(
            box,
            boundary.settings,
            self.shared.tensors,
            name=self._joining.name,
            session=self._session,
            index=self.shared.index,
            t=self._tally.t,
            total=self._tally.tokens,
            feed=self._feed.state(),
            boxes=self.shared.boxes,
        )
        begun, bases = self._own.begin_capture(place)
        boundary.hold_bases(bases)
        return begun

    # ---- leaving ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stay until the last steps are in the model; a run that ended leaves its final parameters here."""
        leaving = self._leave_wait or self._give_last_steps()
        if self._steps_after_end and self._leads:
            say(f"{self._steps_after_end:,} steps were made after the run's end: they are in no model and no figure")
        boundary = self.shared.boundary
        if not self._final:
            asked = self._preemption.why
            if asked and self._joined is None and not self._courier.replays:  # it trained before it heard of the run
                raise self._preemption.make_unjoined()
            saved = bool(asked) and boundary is not None and self._saver.save_for_later(self._begin_capture)
            self._courier.send(Goodbye(leaving.goodbye_reason(asked, saved=saved)))
        elif boundary is not None:
            boundary.load_base()
            self._finished = True

    def _give_last_steps(self) -> LeaveWait:
        """Stop, and wait until the last steps are in the model. From here on no step counts."""
        self._exchange.finish()
        self._stopped = True
        self._saver.hurry()
        if self._preemption.asked:
            self._tape.add(StoppedEntry(self._tally.t))
        self._tape.tell()
        self._report()
        self._leave_wait = self._await_the_end()
        return self._leave_wait

    def _await_the_end(self) -> LeaveWait:
        """Wait until the run is over, or until nothing keeps this learner in it any more."""
        shared = self.shared
        leaving = LeaveWait(time.monotonic(), ending=self._done)
        while self._exchange.agree(
            not self._final
            and shared.boundary is not None
            and not leaving.may_go(time.monotonic(), self._patience_s(), replay=self._until is not None)
        ):
            self._courier.wait(self._exchange.pause_s(0.2))
            self._listen()
            if shared.boundary is None:
                break
            shared.boundary.serve_orders(over=True)
            self._tape.tell()
            leaving.look(time.monotonic(), ending=self._done, unmerged=shared.unmerged())
        return leaving

    def _patience_s(self) -> float:
        cycle_s, tally = None, self._tally
        if (boundary := self.shared.boundary) is not None and tally.step_s is not None:
            longest = max(one.sync_every for one in boundary.settings.in_all_phases)
            cycle_s = longest * tally.step_s
        return patience_s(cycle_s, hurried=self._preemption.hurried)

    def end(self, error: BaseException | None) -> None:
        """Let everything go; the syncer hears why."""
        if error is not None and not self._final:
            self._courier.send(Goodbye(broken_off(error)))
        self._inputs.close()
        self._preemption.stop()
        self._courier.close()
        self._own.room.close()
        if not self._preemption.hurried:
            finish_removals()
        self.shared.close()
