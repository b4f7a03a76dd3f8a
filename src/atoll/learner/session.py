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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs
from torch import nn

from atoll.fabric.address import parse_address
from atoll.learner.boundary import SharedMailbox
from atoll.learner.courier_process import CourierProcess, TapeRecorder, describe_machine
from atoll.learner.data import Feed, NamedDataset
from atoll.learner.folder import LearnerFolder, ask_run
from atoll.learner.meeting import AgreedFacts, Meeting, RankFacts
from atoll.learner.model import BufferRule, load_weights
from atoll.learner.peer_state_transfer import PeerOrder, PeerStates
from atoll.learner.placement import PlacementWish
from atoll.learner.ranks import (
    RANKS_PAUSE_S,
    DataShare,
    RankGroup,
    find_data_share,
    open_meeting_place,
    rank_folder,
)
from atoll.learner.resharding import make_whole_boxes, part_of_rank, refit, saved_boxes
from atoll.learner.saved_state import OwnState, SavedPart, Saver, describe_place, find_part_of_ranks, find_saved_part
from atoll.learner.script import LeaveRequest, LeaveWait, broken_off, patience_s, say
from atoll.learner.snapshot import Snapshot, read
from atoll.learner.state import BegunSnapshot, Optimizers, Stateful, optimizers_by_path
from atoll.learner.step_stats import InputDigest, StepCounter
from atoll.learner.unmerged import FrozenRule, UnmergedTensors
from atoll.mailbox.channel import (
    DialFailed,
    ForgetOrder,
    Goodbye,
    GoOrder,
    RunProgress,
    SettingsTold,
    Start,
    StepReport,
    StopOrder,
    ToTraining,
    Welcomed,
)
from atoll.protocol.errors import ConfigError, RunFailed, Unreachable
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Stepped
from atoll.protocol.tape import BeganEntry, ForgotEntry, InformedEntry, MarkedEntry, StoppedEntry, SuppliedEntry
from atoll.store.removal import finish_removals
from atoll.store.rundir import UNMERGED

DIAL_S = 5.0
"""A courier has this long to dial, also where all other time was spent on asking which run it is."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Who comes to which run."""

    url: str
    name: str
    seed: int
    data: str
    """A digest of what it trains on."""
    wait_s: float
    """How long it waits for the run's parameters and a peer's state before training begins without them."""
    tokens_per_step: int = 0
    """The most that a step has, where the script says so."""
    host: str = ""
    pid: int = 0
    proof: str = ""
    """Where it is, and that it is the successor of whoever had its name (folder.py)."""
    buffers: BufferRule = None
    frozen: FrozenRule = "run"
    placement: PlacementWish = "auto"


class RunSession:
    def __init__(
        self,
        joining: JoinRequest,
        model: nn.Module,
        optimizers: Optimizers,
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
        self._joining, self._model, self._optimizers = joining, model, optimizers
        self._courier, self._tally, self._feed = courier, tally, feed
        self._session = secrets.token_hex(8)
        self._tape = TapeRecorder(courier)
        where = (joining.buffers, joining.placement, optimizers, ranks)
        self.shared = SharedMailbox(model, courier, self._tape, *where)
        self._ranks, self._meeting = ranks, Meeting()
        self._leads = ranks is None or ranks.rank == 0
        self.data_share = DataShare() if ranks is None else find_data_share(ranks, model)
        self._unmerged = UnmergedTensors(model, joining.buffers, joining.frozen if ranks is None else "mine")
        shared = {name: thing for name, thing in extras.items() if name in from_peers}
        rest = [name for name in extras if name not in from_peers]
        self._own = OwnState(model, optimizers, extras, joining.buffers)
        kept = (joining.buffers, self._unmerged, rest, self._own.room)
        self._peers = PeerStates(model, optimizers, shared, courier, self._tape, *kept)
        self._inputs = InputDigest(model, wanted=lambda: feed.position < 0)
        self._restored = False
        """Its inner optimizer comes from what this learner saved, and is put back once it has joined."""
        self._own_folder, self._folder, self._saver = folder, folder.path, Saver(folder.path)
        self._join_by = 0.0
        """When `join` stops waiting and lets training begin."""
        self._preemption = LeaveRequest()
        self._until: int | None = 0 if courier.replays else None
        """Replay: the step at which it waits."""
        self._told: RunProgress | None = None
        """The newest that the courier said of the run."""
        self._known = RunProgress()
        """What the step under way goes by."""
        self._done = self._final = self._stopped = False
        self._connected = False
        """The line 'connected to run …' was printed."""
        self._joined = False
        """The line 'joined run …' was printed: it has the run's parameters."""
        self._unreached = ""
        """Why the syncer could not be reached, while it was not."""

    @property
    def done(self) -> bool:
        """The run has ended, or this machine is taken away."""
        return self._done or (self._preemption.asked if self._ranks is None else self._meeting.leaving)

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
            load_weights(self._model, Path(init))
        self._join_by = time.monotonic() + self._joining.wait_s
        run = self._named_run() or self._ask_run()
        run = run if self._ranks is None else self._ranks.share(run, str)
        self._use_folder_of(run)
        earlier = self._find_earlier(run)
        self._restored = earlier is not None
        if earlier is not None:
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
        if earlier is not None:
            self._put_back(earlier)
            self._restored = False
        self._say_joined()
        self._look_up()
        self._preemption.begun = True

    def _find_earlier(self, run: str) -> SavedPart | None:
        if self._ranks is not None:
            part = find_part_of_ranks(self._ranks, self._folder, run, self._fit_part)
            same = part is not None and saved_boxes(part.snapshot) == self.shared.boxes
            return part if part is None or same else replace(part, exact=False)
        earlier = find_saved_part(self._folder, run)
        if earlier is None or self._folder is None or not saved_boxes(earlier.snapshot):
            return earlier
        own = make_whole_boxes(self.shared.tensors)
        root = Path(os.environ.get("ATOLL_STATE") or self._folder / earlier.file).parent
        fitted = refit(earlier.snapshot, root, earlier.file, own, self.shared.tensors)
        return replace(earlier, snapshot=fitted, exact=False)

    def _fit_part(self, root: Path, file: str) -> Snapshot:
        """A rank's own part where it was saved by as many ranks in the same layout, else what lies in its boxes."""
        assert self._ranks is not None
        path = part_of_rank(root, self._ranks.rank, file)
        if path.exists() and saved_boxes(part := read(path)) == self.shared.boxes:
            return part
        own = self.shared.boxes[self._ranks.rank]
        return refit(read(root / file), root, file, own, self.shared.tensors)

    def _put_back(self, earlier: SavedPart) -> None:
        if earlier.run and self._run and self._run != earlier.run:
            say(f"{earlier.file} in {self._folder} is of run {earlier.run}: the inner optimizer begins afresh")
            return
        try:
            place = self._own.restore_saved(earlier.snapshot)
        except ConfigError as error:
            if not earlier.run:  # somebody asked for it
                raise
            say(f"{earlier.file} in {self._folder} does not fit, the inner optimizer begins afresh: {error}")
            return
        if self._leads:
            say(f"goes on with the inner optimizer, schedules and random states of step {place['t']}")

    @property
    def _run(self) -> str:
        """The run's name; empty until it is heard of."""
        return self.shared.box.run if self.shared.box is not None else ""

    def _named_run(self) -> str:
        """What the join link says; empty: nothing."""
        return "" if self._courier.replays else parse_address(self._joining.url).run

    def _ask_run(self) -> str:
        """What the syncer at a plain address says: what was saved of its run is looked for before the run hears of
        this learner. Empty: a folder was named, or nobody answers; then the courier goes on asking."""
        if self._courier.replays or self._own_folder.runs is None:
            return ""
        while (run := ask_run(self._joining.url)) is None and not self._preemption.asked:
            if time.monotonic() >= self._join_by:
                break
            time.sleep(0.25)
        return run or ""

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

    def _say_connected(self, welcome: Welcomed) -> None:
        """Once, where the run has not begun: the terminal would stay empty until the others are there."""
        if self._connected or not self._leads or self._courier.replays or min(welcome.versions, default=0) >= 0:
            return
        self._connected = True
        learners, wait_s = welcome.settings.learners, welcome.settings.wait_for_learners_s
        begins = f"it begins once {learners} learners are here, or after {wait_s:g} s"
        waits = begins if wait_s and learners > 1 else "it begins with the first parameters"
        say(f"connected to run {welcome.run} as {self._joining.name}; {waits}")

    def _say_joined(self) -> None:
        """Once: a learner that trains before it has the run's parameters joins later."""
        if not self._joined and not self._courier.replays and self.shared.has_parameters():
            self._joined = True
            self._use_folder_of(self._run)
            self._saver.enter_run(self._run)
            if self._leads:
                ranks = f", {self._ranks.size} ranks" if self._ranks is not None else ""
                say(f"joined run {self._run} as {self._joining.name}{ranks}")

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
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        file, exact = (earlier.file, earlier.exact) if earlier is not None else ("", False)
        began = describe_machine(self._tally.t, device, file, exact)
        return began if self._ranks is None else structs.replace(began, ranks=self._ranks.size)

    def _introduce(self, *, sure: bool = False) -> None:
        """Send a new courier all that it needs."""
        who, boxed = self._joining, self.shared.boundary is not None
        unmerged = (self._unmerged.digest, self._unmerged.takes, self._unmerged.frozen_bytes)
        declared = who.tokens_per_step if self._ranks is None else 0  # tokens of other ranks are counted a step late
        known = (who.data, self._restored, declared, who.host, who.pid, who.proof, *unmerged)
        start = Start(who.name, self._session, who.url, self.shared.tensors, boxed, *known)
        if self._ranks is None:
            self._courier.send(start)
        else:
            self._introduce_rank(start, self._ranks)
        self.shared.hand_to_courier(self._counted(), sure=sure, waits=self._peers.waits)
        if self._feed.registered is not None:
            self._courier.send(self._feed.registered)
        self._tape.send_all_entries()

    def _introduce_rank(self, start: Start, ranks: RankGroup) -> None:
        """The couriers of the other ranks find rank 0's at a socket that is made here."""
        listening, address = open_meeting_place() if ranks.rank == 0 else (None, "")
        session, address, secret = ranks.share((self._session, address, secrets.token_hex(16)), tuple[str, str, str])
        self._session = session
        leader = address if ranks.rank else ""
        told = structs.replace(
            start, session=session, ranks=self.shared.boxes, rank=ranks.rank, leader=leader, secret=secret
        )
        self._courier.send(told, listening.fileno() if listening is not None else None)
        if listening is not None:
            listening.close()

    def _wait_until_joined(self) -> None:
        """Wait for the run's parameters and a peer's state, at most until `_join_by`, or for `DIAL_S` where that is
        later; then train without them, and take them when they come."""
        deadline = max(self._join_by, time.monotonic() + min(self._joining.wait_s, DIAL_S))
        while self._until is not None and self._until <= self._tally.t and not self._final:
            self.wait(0.5)
        while self._agree(
            self._until is None and not self._final and not self._is_current() and not self._preemption.asked
        ):
            left = deadline - time.monotonic()
            if self._agree(left <= 0):
                self._check_reached()
                self._say_unjoined()
                return
            self.wait(min(left, 0.5))

    def _is_current(self) -> bool:
        """It has the run's parameters and progress, and waits for no peer."""
        return self.shared.has_parameters() and not self._peers.waits and self._told is not None

    def _check_reached(self) -> None:
        """Unreachable: no syncer has ever answered this process. To train on would be to train alone."""
        if self.shared.boundary is None and self._unreached:
            raise Unreachable(
                f"no syncer answers: {self._unreached}, tried for {self._joining.wait_s:g} s; "
                "is the run over, or its address another now? atoll syncer prints it"
            )

    def _say_unjoined(self) -> None:
        syncer = self._joining.url.rpartition("@")[2]  # what stands before it is a secret
        what = "state of a peer's" if self.shared.has_parameters() else f"parameters from the syncer at {syncer}"
        say(f"no {what} for {self._joining.wait_s:g} s: training begins without it, and joins when it can")

    def ask_for_leases(self, found: tuple[NamedDataset, ...], batch_size: int, epochs: int) -> None:
        boundary = self.shared.boundary
        seed = boundary.settings.seed if boundary is not None else self._joining.seed
        self._courier.send(self._feed.ask(found, batch_size * self.data_share.parts, epochs, seed))

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
        if self._ranks is not None:
            self._exchange(self._ranks, tokens)
        self._listen()
        if self._ranks is not None and self.done:
            self._apply(self._ranks.finish_exchange())  # the last copies know of all tokens
        if shared.boundary is not None:
            shared.boundary.adopt_ready(tally.t)
            self._tape.tell()
            shared.boundary.make_copies(tally.t)
            self._report()
            self._make_room()
            self._hold()
            self._say_joined()
            self._look_up()

    def _make_room(self) -> None:
        if self._joined and self.shared.box is not None:
            self._own.make_room(self.shared.box)

    def _hold(self) -> None:
        """Only a synchronous run ever holds, and a replay."""
        t, shared = self._tally.t, self.shared
        assert shared.boundary is not None
        may_hold = self._ranks is None or shared.boundary.settings.synchronous  # to ask the others is to wait for them
        while may_hold and self._agree(shared.boundary.is_held(t) and not self.done):
            self._courier.wait(self._pause_s(0.5))
            self._listen()
            shared.boundary.adopt_ready(t)
            shared.boundary.make_copies(t)  # ordered too late for this boundary: the round that it waits for needs it
            shared.boundary.settle()
        # A replay waits at this step, also once it was told to end: what its tape says next may be on its way.
        while self._until is not None and self._until <= t and not self._final:
            self.wait(0.5)

    def wait(self, seconds: float) -> None:
        """Not training: listen, and serve what is due. All ranks call it together."""
        self._courier.wait(self._pause_s(seconds))
        self._agree(False)
        self._listen()
        if self.shared.boundary is not None:
            self.shared.boundary.serve_orders()

    # ---- together with the other ranks ----------------------------------------------------------------------------

    def _exchange(self, ranks: RankGroup, tokens: int) -> None:
        """After a step. What the last exchange said holds from now on; a synchronous run waits for this one."""
        self._collect_frames()
        self._apply(ranks.finish_exchange())
        ranks.begin_exchange(self._facts(tokens if self.data_share.counts else 0))
        if self.shared.boundary is not None and self.shared.boundary.settings.synchronous:
            self._apply(ranks.finish_exchange())

    def _agree(self, vote: bool) -> bool:
        """What rank 0 says, on all ranks; and they all have the same frames to carry out. Not while training."""
        if self._ranks is None:
            return vote
        self._collect_frames()
        self._apply(self._ranks.finish_exchange())
        self._ranks.begin_exchange(self._facts(vote=vote))
        agreed = self._ranks.finish_exchange()
        self._apply(agreed)
        return agreed is not None and agreed.first.vote

    def _facts(self, tokens: int = 0, *, vote: bool = False) -> RankFacts:
        meeting = self._meeting
        heard = meeting.heard or RunProgress(committed=-1)
        told = (heard.committed, heard.progress, heard.global_step)
        return RankFacts(meeting.received, tokens, self._preemption.asked, vote, *told)

    def _apply(self, agreed: AgreedFacts | None) -> None:
        if agreed is None:
            return
        self._meeting.agreed = agreed.frames
        self._tally.tokens += agreed.tokens
        if self.shared.boundary is not None:
            self.shared.boundary.add_tokens(agreed.tokens)
        if agreed.first.committed >= 0:
            self._told = RunProgress(agreed.first.committed, agreed.first.progress, agreed.first.global_step)
        if agreed.leaving:
            self._meeting.leaving = True
            self._preemption.ask("another of its ranks was asked to leave")

    def _collect_frames(self) -> None:
        """Keep what the courier sent until all ranks have it. What is rank 0's alone, and what ends the learner, is
        not waited with: the other ranks may be gone."""
        for frame in self._courier.receive():
            if isinstance(frame, RunProgress):
                self._meeting.heard = frame
            elif isinstance(frame, DialFailed) or (isinstance(frame, StopOrder) and frame.failed):
                self._carry_out(frame)
            else:
                self._meeting.add(frame)

    def _take_frames(self) -> list[ToTraining]:
        """Those to be carried out now."""
        if self._ranks is None:
            return self._courier.receive()
        self._collect_frames()
        return self._meeting.take_agreed()

    def _pause_s(self, seconds: float) -> float:
        """Ranks wait for one another at every turn, so the turns are short."""
        return seconds if self._ranks is None else min(seconds, RANKS_PAUSE_S)

    # ---- how far the run is -----------------------------------------------------------------------------------------

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
        for frame in self._take_frames():
            self._carry_out(frame)
        for saved in self._saver.results():
            self._courier.send(saved)
        self._peers.settle()
        if self.shared.boundary is not None:
            self.shared.boundary.send_finished_copies()

    def _carry_out(self, frame: ToTraining) -> None:
        t = self._tally.t
        if isinstance(frame, PeerOrder):
            self._peers.carry_out(frame, t)
            return
        match frame:
            case Welcomed():
                self._say_connected(frame)
                self._unmerged.compare(frame.frozen)
                if self.shared.apply_welcome(frame):
                    self.shared.hand_to_courier(self._counted())
            case SettingsTold(settings):
                if (boundary := self.shared.boundary) is not None:
                    boundary.settings = settings
            case RunProgress():
                self._told = frame
            case DialFailed(reason):
                self._unreached = reason
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
        if reset and (optimizers := optimizers_by_path(self._optimizers)):
            for optimizer in optimizers.values():
                optimizer.state.clear()
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
            busy_s=self._tally.busy_s,
            feed=self._feed.state(),
            boxes=self.shared.boxes,
        )
        begun, bases = self._own.begin_capture(place)
        boundary.hold_bases(bases)
        return begun

    # ---- leaving ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stay until the last steps are in the model; a run that ended leaves its final parameters here."""
        if self._ranks is not None:
            self._apply(self._ranks.finish_exchange())
        self._stopped = True
        self._saver.hurry()
        if self._preemption.asked:
            self._tape.add(StoppedEntry(self._tally.t))
        self._tape.tell()
        self._report()
        leaving = self._await_the_end()
        boundary = self.shared.boundary
        if not self._final:
            asked = self._preemption.why
            saved = bool(asked) and boundary is not None and self._saver.save_for_later(self._begin_capture)
            self._courier.send(Goodbye(leaving.goodbye_reason(asked, saved=saved)))
        elif boundary is not None:
            boundary.load_base()

    def _await_the_end(self) -> LeaveWait:
        """Wait until the run is over, or until nothing keeps this learner in it any more."""
        shared = self.shared
        leaving = LeaveWait(time.monotonic(), ending=self._done)
        while self._agree(
            not self._final
            and shared.boundary is not None
            and not leaving.may_go(time.monotonic(), self._patience_s(), replay=self._until is not None)
        ):
            self._courier.wait(self._pause_s(0.2))
            self._listen()
            if shared.boundary is None:
                break
            shared.boundary.serve_orders(over=True)
            self._tape.tell()
            leaving.look(time.monotonic(), ending=self._done, unmerged=shared.unmerged())
        return leaving

    def _patience_s(self) -> float:
        cycle_s, tally = None, self._tally
        if (boundary := self.shared.boundary) is not None and tally.t > 0:
            longest = max(one.sync_every for one in boundary.settings.in_all_phases)
            cycle_s = longest * tally.busy_s / tally.t
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
