"""The courier: runs the learner's state machine between the training process and the syncer.

It takes frames from the training process over a local socket and messages from the syncer over the fabric, hands both
to `protocol.learner`, and carries out what comes back; what concerns the shared memory is in memory.py. Everything but
the work on large fragments (body.py) is done on one event loop. While an adopted version is copied into the base,
further frames of the training process wait: the state machine hears of them in their order. When the training process
is gone, so is the courier, and the syncer is told why. A courier whose state is inconsistent exits: the training
process starts another.

A learner of several ranks has a courier beside each (docs/adr/0030). Rank 0's is this one, with the state machine; what
it does it has the others do (rank_leader.py), and its state machine hears of what all have done. The others follow it
(rank_follower.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

from atoll.courier.body import FragmentTransfers, OpenBox, load_kernels, open_box, say
from atoll.courier.memory import LearnerMemory
from atoll.courier.processor_use import ProcessorUse
from atoll.courier.rank_channel import BoxReady, ShardsKnown
from atoll.courier.rank_events import SaidByAll
from atoll.courier.rank_follower import RankFollower
from atoll.courier.rank_leader import RankLeader
from atoll.courier.states import StateEffect, StateTransfers
from atoll.fabric.client import SyncerConnection
from atoll.fabric.tasks import lasting
from atoll.mailbox.channel import (
    CopyMade,
    CourierChannel,
    DialFailed,
    Goodbye,
    JoinProgress,
    MailboxReady,
    RunProgress,
    SettingsTold,
    SlotFreed,
    Start,
    StateCopyMade,
    StepMissing,
    StepReport,
    StopOrder,
    ToCourier,
    ToTraining,
    VersionTaken,
    Welcomed,
    decode_to_courier,
    is_counted,
)
from atoll.numerics.codec import make_codec
from atoll.protocol.effects import Note, Tick
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.connection import REASONS
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.learner.ways import Ways
from atoll.protocol.messages import FromSyncer, Hello, Leave, Recover, Refused, SettingsChanged, Welcome
from atoll.protocol.succession import Holder

PARENT_CHECK_S = 1.0
JOIN_REPORT_S = 0.5
"""Time between two reports of how much of the run's parameters has arrived, while it joins."""
FIRST_STEP_LOOK_S = 2.0
"""Time between two looks at whether the training process uses the processor, until its first step."""
SAY_S = 10.0
"""Between two lines that say the same."""
SAY_LOST_S = 15.0
"""Between two lines while no syncer answers, once each reason was said."""


class Courier:
    def __init__(self, channel: CourierChannel, *, direct: bool = True) -> None:
        """`direct`: newcomers of this machine may fetch this learner's state without the syncer."""
        self._channel, self._direct = channel, direct
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._parent = os.getppid()
        self._start: Start | None = None
        self._machine: LearnerMachine | None = None
        self._link: SyncerConnection | None = None
        self._memory: LearnerMemory | None = None
        self._states: StateTransfers | None = None
        self._ways = Ways()
        """Rates of the bodies of this rank, also across shared memory that is made anew."""
        self._shards: tuple[str, ...] = ()
        """Where the other shards of the syncer are, as its last welcome said."""
        self._held: deque[FromSyncer] = deque(maxlen=4096)
        """Messages that wait for the shared memory."""
        self._frames: deque[bytes] = deque()
        """Read and not handled yet."""
        self._adopting: VersionTaken | None = None
        """Frames wait until an adopted version is the base, in all ranks."""
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._unsent_progress: RunProgress | None = None
        self._kernels: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self._said, self._said_at = "", -SAY_S
        self._lost_for: set[str] = set()
        """Lines on why no syncer answered that were printed before this learner joined."""
        self._ranks: RankLeader | None = None
        """The other ranks, where there are several and this is the first."""
        self._follower: RankFollower | None = None
        """Of another rank."""
        self._gathering: asyncio.Task[bool] | asyncio.Task[None] | None = None
        """Waits until the ranks have found each other."""
        self._opened: tuple[OpenBox, MailboxReady] | None = None
        """This rank's memory, until all ranks have theirs."""
        self._stepped = self._step_missing = False
        """The training process has made a step since this courier began."""
        self._ended = False
        """A rank is gone, and the learner with it: nothing more is done."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watch = tasks.create_task(lasting("watch for the parent", self._watch_parent))
            joining = tasks.create_task(lasting("report how far it has joined", self._watch_joining))
            starting = tasks.create_task(lasting("look at the first step", self._watch_first_step))
            self._kernels = tasks.create_task(asyncio.to_thread(load_kernels))
            self._loop.add_reader(self._channel.sock, self._run_callback, self._readable)
            try:
                await self._over.wait()
            finally:  # also where it is cancelled: nothing new begins while its tasks end
                self._over.set()
                self._loop.remove_reader(self._channel.sock)
            watch.cancel()
            joining.cancel()
            starting.cancel()
            await self._close_ranks()
            if self._link is not None:
                await self._link.close()
            if self._memory is not None:
                self._memory.bodies.close()
            if self._states is not None:
                await self._states.close()
        if self._broken is not None:
            raise self._broken

    async def _close_ranks(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        if self._ranks is not None:
            self._ranks.close()
        if self._follower is not None:
            await self._follower.close()

    def _run_callback(self, back: Callable[..., None], *told: object) -> None:
        """asyncio would only log an error and leave half a courier: end it instead."""
        try:
            back(*told)
        except Exception as error:
            self._broken = self._broken or error
            self._over.set()

    # ---- from the training process ------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            self._frames.extend(self._channel.receive())
            while self._frames and self._adopting is None:
                self._handle_frame(decode_to_courier(self._frames.popleft()))
        except AtollError as error:
            self._frames.clear()
            self._send(StopOrder(str(error), final=True, failed=True, mistake=error.exit_code == 2))
        if not self._channel.closed:
            self._channel.flush()
            self._tell_progress()
        elif self._adopting is None:
            self._leave("its training process died")

    def _handle_frame(self, frame: ToCourier) -> None:
        if self._ended and not isinstance(frame, Goodbye):
            return
        if self._follower is not None and not isinstance(frame, Goodbye):
            self._follower.take_frame(frame)
            return
        match frame:
            case Start():
                self._begin(frame)
            case MailboxReady():
                self._open_box(frame)
            case StepReport(stepped, epoch):
                self._stepped = True
                if epoch == (self._memory.epoch if self._memory is not None else 0):
                    self._handle(stepped)
            case StepMissing():
                self._step_missing = True
                if self._machine is not None:
                    self._handle(fx.FirstStep(uses_cpu=False))
            case fx.Told() | fx.Registered() | fx.Taken():
                self._handle(frame)
            case VersionTaken():
                self._take_adoption(frame)
            case CopyMade() | SlotFreed() | fx.Saved():
                if self._ranks is None:
                    self._take_event(frame)
                else:
                    self._ranks.hear(0, frame)
            case StateCopyMade():
                assert self._states is not None
                self._states.copied(frame)
            case Goodbye(reason):
                self._leave(reason, left=True)

    def _take_event(self, event: SaidByAll | fx.LearnerEvent) -> None:
        """What this training process has done, or, of several ranks, what all have."""
        match event:
            case BoxReady():
                assert self._opened is not None
                self._use_box(*self._opened, event)
            case CopyMade():
                assert self._memory is not None
                self._memory.take_copy(event)
            case VersionTaken():
                self._finish_adoption(event)
                self._loop.call_soon(self._resume_reading)
            case SlotFreed():
                assert self._memory is not None
                self._memory.free_slot(event)
            case fx.Saved() | fx.Arriving() | fx.Fetched() | fx.FetchFailed() | fx.Uploaded() | fx.UploadFailed():
                self._handle(event)

    def _begin(self, start: Start) -> None:
        assert self._tasks is not None
        assert self._kernels is not None
        self._start = start
        if start.rank > 0:
            self._follower = RankFollower(self._channel, start, self._run_callback, self._tasks)
            self._gathering = self._tasks.create_task(self._follower.reach_leader(self._kernels))
            return
        self._machine = LearnerMachine(
            start.learner,
            start.session,
            start.tensors,
            start.data,
            restored=start.restored,
            tokens_per_step=start.tokens_per_step,
            holder=Holder(start.session, start.proof, start.host, start.pid),
            frozen=start.frozen,
            takes_frozen=start.takes_frozen,
            ranks=start.ranks,
            unmerged=start.unmerged,
            renamed=start.renamed,
        )
        if start.ranks:
            listener = socket.socket(fileno=self._channel.take_descriptor()) if len(start.ranks) > 1 else None
            on = (self._take_event, self._end_learner, self._run_callback)
            self._ranks = RankLeader(start, listener, *on, self._tasks)
            self._gathering = self._tasks.create_task(self._ranks.wait_for_all())
        if not start.boxed:
            self._dial()

    def _dial(self) -> None:
        assert self._start is not None
        assert self._tasks is not None
        self._link = SyncerConnection(
            self._start.url,
            hello=self._hello,
            on_open=lambda: None,
            on_message=self._message,
            on_lost=self._lost,
        )
        self._states = StateTransfers(
            self._channel, self._link, self._start, self._handle, say, self._tasks, direct=self._direct
        )
        self._tasks.create_task(self._connect(self._link))

    async def _connect(self, link: SyncerConnection) -> None:
        """Once the kernels are there: a pull that has to wait for them would hold up the event loop, and whoever is
        part of a run and says nothing for some seconds is taken for dead."""
        assert self._kernels is not None
        await asyncio.wait([self._kernels])
        if self._gathering is not None:
            await asyncio.wait([self._gathering])
        await link.run()

    def _open_box(self, frame: MailboxReady) -> None:
        """The training process has made the shared memory, or hands it to the successor of a dead courier."""
        assert self._start is not None
        opened = open_box(self._channel.take_descriptor(), self._start, frame)
        rows = (opened.box.adopted, opened.box.base_version)
        ready = BoxReady(*(tuple(map(int, row)) for row in rows))
        if self._ranks is None:
            self._use_box(opened, frame, ready)
        else:
            self._opened = (opened, frame)
            self._ranks.hear(0, ready)

    def _use_box(self, opened: OpenBox, frame: MailboxReady, ready: BoxReady) -> None:
        """`ready`: what it holds, or, of several ranks, what each has of its part."""
        assert self._start is not None
        assert self._machine is not None
        assert self._tasks is not None
        box, before = opened.box, self._memory
        epoch, unsure = (before.epoch, before.unsure) if before is not None else (0, set())
        if before is not None:
            before.bodies.retire()
        self._machine.keeps_feedback = make_codec(frame.settings.codec).needs_feedback
        if self._link is None:
            unsure = set() if frame.sure else set(range(len(opened.plan.fragments)))
            whole = [v if v == b else -1 for v, b in zip(ready.adopted, ready.base, strict=True)]
            counted = list(ready.adopted)
            incarnation = box.count("incarnation")
            waits, term = frame.waits, box.count("term")
            self._machine.restore(box.run, whole, frame.stepped, incarnation, counted, seeking=waits, term=term)
            self._dial()
        assert self._link is not None
        tell = self._handle if self._ranks is None else partial(self._ranks.hear, 0)
        about = (self._start, tell, self._tasks, opened.rank_plan)
        bodies = FragmentTransfers(box, self._link, frame.settings, *about, ways=self._ways)
        using = (self._machine, self._ranks, self._send, self._handle)
        self._memory = LearnerMemory(opened, frame.settings, bodies, *using, epoch=epoch, unsure=unsure)
        self._use_shards(bodies)
        if self._ranks is not None:
            self._ranks.use_bodies(bodies)
        self._handle(fx.Lacking(bodies.count_lacking()))  # its first report says how much it will fetch
        self._handle(frame.stepped)  # its counters are those of this memory
        while self._held:
            self._deliver(self._held.popleft())

    def _take_adoption(self, frame: VersionTaken) -> None:
        memory = self._memory
        assert memory is not None
        if frame.epoch == memory.epoch:
            self._adopting = frame
        if memory.bodies.replace_base(frame, lambda: frame.epoch != memory.epoch, self._resume_after):
            self._note_base(frame)

    def _resume_after(self, frame: VersionTaken) -> None:
        self._run_callback(self._note_base, frame)
        self._resume_reading()

    def _note_base(self, frame: VersionTaken) -> None:
        """What this training process has adopted is the base, or was forgotten."""
        if self._ranks is None:
            self._finish_adoption(frame)
        else:
            self._ranks.hear(0, frame)

    def _finish_adoption(self, frame: VersionTaken) -> None:
        """It is the base, in all ranks."""
        assert self._memory is not None
        if frame is self._adopting:
            self._adopting = None
        self._memory.finish_adoption(frame)

    def _resume_reading(self) -> None:
        if not self._over.is_set():
            self._run_callback(self._readable)

    # ---- from the syncer ----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        assert self._machine is not None
        return self._machine.hello()

    def _message(self, message: FromSyncer) -> None:
        if isinstance(message, Welcome):
            self._lost_for.clear()
            known = (
                message.fingerprint,
                message.incarnation,
                message.versions,
                message.index,
                message.frozen,
                message.run,
                message.succeeds,
            )
            self._shards = message.shards
            outdated = self._serving is not None and not self._serving.fits(message)
            if self._ranks is not None and outdated:
                self._end_learner("the run has another plan or codec than before: the learner starts over")
                return
            self._send(Welcomed(message.settings, *known))
            if self._serving is not None and outdated:
                self._serving.in_use = False
        if self._serving is None and not isinstance(message, Refused):
            self._held.append(message)
        else:
            self._deliver(message)

    def _deliver(self, message: FromSyncer) -> None:
        if isinstance(message, Welcome) and self._memory is not None and not self._use_shards(self._memory.bodies):
            return
        self._handle(fx.Arrived(message))
        if isinstance(message, Welcome | Recover) and self._serving is not None:
            self._serving.note_run(message)
        elif isinstance(message, SettingsChanged):
            self._send(SettingsTold(message.settings))

    @property
    def _serving(self) -> LearnerMemory | None:
        """The shared memory, where it serves this run. If not, the training process makes it anew."""
        return self._memory if self._memory is not None and self._memory.in_use else None

    def _use_shards(self, bodies: FragmentTransfers) -> bool:
        """Whether the addresses that the syncer named can be dialled."""
        try:
            bodies.use_shards(self._shards)
        except ConfigError as error:
            text = f"the syncer names a shard that cannot be reached from here: {error}"
            self._send(StopOrder(text, final=True, failed=True, mistake=True))
            return False
        if self._ranks is not None:
            self._ranks.send(ShardsKnown(self._shards))
        return True

    def _lost(self, reason: str) -> None:
        self._held.clear()
        if self._serving is not None:
            self._handle(fx.Disconnected(reason, self._link.lost if self._link is not None else "syncer"))
            return
        self._channel.send(DialFailed(reason, met_another=self._link is not None and self._link.met_another))
        peer = "its relay" if self._link is not None and self._link.lost == "relay" else "the syncer"
        self._say_lost(f"{peer} is out of reach ({reason}); dialling again")

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: fx.LearnerEvent) -> None:
        if self._machine is None or self._ended or self._over.is_set():
            return
        for effect in self._machine.handle(self._loop.time(), event):
            self._carry_out(effect)
        if self._serving is not None:
            self._serving.order_waiting()
        self._channel.flush()
        self._tell_progress()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if self._machine.wake_at is not None:
            self._wake = self._loop.call_at(self._machine.wake_at, self._run_callback, self._handle, Tick())

    def _carry_out(self, effect: fx.LearnerEffect) -> None:
        assert self._machine is not None
        if isinstance(effect, StateEffect):
            assert self._states is not None
            self._states.carry_out(effect)
            return
        match effect:
            case fx.Say(message):
                if self._link is not None:
                    self._link.send(message)
            case Note(_, text):
                self._say_note(text)
            case fx.Save() | fx.Supply() | fx.AskToLeave() | fx.HoldBack() | fx.BeginTraining():
                self._send(effect)
            case fx.Inform(progress, global_step, committed):
                self._unsent_progress = RunProgress(committed, progress, global_step)
            case fx.HangUp():
                if self._link is not None:
                    self._link.hang_up()
            case fx.Stop(reason, final, failed):
                self._send(StopOrder(reason, final, failed, mistake=failed))
                if final:
                    self._close_link()
            case _:
                if self._serving is not None:
                    self._serving.carry_out(effect)

    def _say_lost(self, text: str) -> None:
        """Say each reason once, and then one line in a while. Of several addresses, dialled in turn ten times in a
        minute, each has a reason of its own."""
        now = self._loop.time()
        is_new = text not in self._lost_for and len(self._lost_for) < REASONS
        if is_new or now - self._said_at >= SAY_LOST_S:
            self._lost_for.add(text)
            self._said, self._said_at = text, now
            say(text)

    def _say_note(self, text: str) -> None:
        """The same words, such as those of a syncer that lets nobody in yet, once in a while."""
        if text != self._said or self._loop.time() - self._said_at >= SAY_S:
            self._said, self._said_at = text, self._loop.time()
            say(text)

    def _send(self, frame: ToTraining) -> None:
        """To the training process; what all ranks carry out, to the others too."""
        if self._ranks is not None and (is_counted(frame) or isinstance(frame, StopOrder)):
            self._ranks.send(frame)
        self._channel.send(frame)

    def _tell_progress(self) -> None:
        """To a training process that reads nothing for a while (one long step) only the newest is sent: what waits for
        it does not grow with the rounds."""
        if self._unsent_progress is not None and not self._channel.clogged:
            self._channel.send(self._unsent_progress)
            self._unsent_progress = None

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, reason: str, *, left: bool = False) -> None:
        """`left`: the training process has said so itself."""
        if self._over.is_set():
            return
        self._say_goodbye(reason)
        if self._ranks is not None and left:
            self._ranks.send(Goodbye(reason))
        if self._follower is not None:
            self._follower.say_goodbye(reason, left=left)
        self._over.set()

    def _say_goodbye(self, reason: str) -> None:
        if self._link is not None:
            for word in self._machine.make_goodbye(reason) if self._machine else [Leave(reason=reason)]:
                self._link.send(word)

    def _end_learner(self, reason: str) -> None:
        """One of its ranks is gone, or cannot go on: so does none of them, and the syncer hears of it now."""
        if self._ended or self._over.is_set():
            return
        say(reason)
        self._send(StopOrder(reason, final=True, failed=True))
        self._say_goodbye(reason)
        self._ended, self._adopting = True, None
        self._close_link()
        self._loop.call_soon(self._resume_reading)

    def _close_link(self) -> None:
        """Nothing more is said to the syncer. Its training process may take its time to go: whoever dialled again
        meanwhile would come back to a run that it has left."""
        if self._link is not None:
            assert self._tasks is not None
            self._tasks.create_task(self._link.close())

    async def _watch_joining(self) -> None:
        while True:
            await asyncio.sleep(JOIN_REPORT_S)
            if self._machine is not None and self._machine.fetches_parameters and not self._over.is_set():
                self._run_callback(self._report_lacking)

    def _report_lacking(self) -> None:
        if (memory := self._serving) is None:
            return
        lacking = memory.bodies.count_lacking()
        if self._ranks is not None:
            lacking = max(lacking, self._ranks.most_lacking)
        self._handle(fx.Lacking(lacking))
        if not self._channel.clogged:  # what waits for a training process that reads nothing is not to grow
            self._channel.send(JoinProgress(memory.bodies.whole_bytes, lacking))

    async def _watch_first_step(self) -> None:
        """torch.compile may take minutes, in the training process and in those that it starts."""
        usage = ProcessorUse(self._parent, but=os.getpid())
        while True:
            await asyncio.sleep(FIRST_STEP_LOOK_S)
            if self._stepped or self._step_missing:
                continue
            works = await asyncio.to_thread(usage.look)  # also while it joins: what came before the step is known then
            if self._machine is not None and self._machine.phase == "training" and not self._over.is_set():
                self._run_callback(self._note_first_step, works)

    def _note_first_step(self, uses_cpu: bool) -> None:
        if not self._stepped and not self._step_missing:
            self._handle(fx.FirstStep(uses_cpu))

    async def _watch_parent(self) -> None:
        """A worker forked off the training process may keep its socket open, so watch the parent pid as well."""
        while True:
            await asyncio.sleep(PARENT_CHECK_S)
            if os.getppid() != self._parent:
                self._leave("its training process died")


def main(fd: int) -> int:
    # Ctrl-C, and the SIGTERM that a scheduler sends to all processes of a job, are for the training process: it leaves
    # in good order, for which it needs us. We end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = CourierChannel(socket.socket(fileno=fd))

    async def run() -> None:
        await Courier(channel, direct=os.environ.get("ATOLL_DIRECT", "1") != "0").run()

    code = 0
    try:
        asyncio.run(run())
    except* AtollError as errors:
        say(str(errors.exceptions[0]))
        code = 1
    return code
