"""The courier: runs the learner's state machine between the training process and the syncer.

It takes frames from the training process over a local socket and messages from the syncer over the fabric, hands both
to `protocol.learner`, and carries out what comes back. Everything but the work on large fragments (body.py) is done on
one event loop. While an adopted version is copied into the base, further frames of the training process wait: the state
machine hears of them in their order. When the training process is gone, so is the courier, and the syncer is told
why. A courier whose state is inconsistent exits: the training process starts another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

from atoll.courier.body import FragmentTransfers, load_kernels
from atoll.courier.states import StateEffect, StateTransfers
from atoll.fabric.client import SyncerConnection
from atoll.fabric.tasks import lasting
from atoll.mailbox.box import Layout, Mailbox, serves
from atoll.mailbox.channel import (
    BASE,
    AdoptOrder,
    CopyMade,
    CourierChannel,
    DialFailed,
    ForgetOrder,
    Goodbye,
    HoldOrder,
    MailboxReady,
    ReadOrder,
    RunProgress,
    SettingsTold,
    SlotFreed,
    Start,
    StateCopyMade,
    StepReport,
    StopOrder,
    ToCourier,
    VersionTaken,
    Welcomed,
    decode_to_courier,
)
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol import schedule
from atoll.protocol.effects import Note, Tick
from atoll.protocol.errors import AtollError
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import FromSyncer, Hello, Leave, Recover, Refused, SettingsChanged, Welcome
from atoll.protocol.settings import Settings
from atoll.protocol.succession import Holder

PARENT_CHECK_S = 1.0
SAY_S = 10.0
"""Between two lines that the syncer is out of reach, while there is no run to be part of yet."""


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
        self._box: Mailbox | None = None
        self._bodies: FragmentTransfers | None = None
        self._states: StateTransfers | None = None
        self._plan: FragmentPlan | None = None
        self._made_for: Settings | None = None
        """The settings that the shared memory was made for."""
        self._held: deque[FromSyncer] = deque(maxlen=4096)
        """Messages that wait for the shared memory."""
        self._frames: deque[bytes] = deque()
        """Read and not handled yet."""
        self._copying_base = False
        """Frames wait until an adopted version is the base."""
        self._epoch = 0
        self._wake: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._unsure: set[int] = set()
        """Fragments whose next adoption is an overwrite: the courier before this one died, and may have known more."""
        self._unsent_progress: RunProgress | None = None
        self._kernels: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None
        self._said_at = -SAY_S

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watch = tasks.create_task(lasting("watch for the parent", self._watch_parent))
            self._kernels = tasks.create_task(asyncio.to_thread(load_kernels))
            self._loop.add_reader(self._channel.sock, self._run_callback, self._readable)
            try:
                await self._over.wait()
            finally:  # also where it is cancelled: nothing new begins while its tasks end
                self._over.set()
                self._loop.remove_reader(self._channel.sock)
            watch.cancel()
            if self._link is not None:
                await self._link.close()
            if self._bodies is not None:
                self._bodies.close()
            if self._states is not None:
                await self._states.close()
        if self._broken is not None:
            raise self._broken

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
            while self._frames and not self._copying_base:
                self._handle_frame(decode_to_courier(self._frames.popleft()))
        except AtollError as error:
            self._frames.clear()
            self._channel.send(StopOrder(str(error), final=True, failed=True, mistake=error.exit_code == 2))
        if not self._channel.closed:
            self._channel.flush()
            self._tell_progress()
        elif not self._copying_base:
            self._leave("its training process died")

    def _handle_frame(self, frame: ToCourier) -> None:
        match frame:
            case Start():
                self._start = frame
                self._machine = LearnerMachine(
                    frame.learner,
                    frame.session,
                    frame.tensors,
                    frame.data,
                    restored=frame.restored,
                    tokens_per_step=frame.tokens_per_step,
                    holder=Holder(frame.session, frame.proof, frame.host, frame.pid),
                    frozen=frame.frozen,
                    takes_frozen=frame.takes_frozen,
                )
                if not frame.boxed:
                    self._dial()
            case MailboxReady():
                self._open_box(frame)
            case StepReport(stepped, epoch):
                if epoch == self._epoch:
                    self._handle(stepped)
            case fx.Told() | fx.Registered() | fx.Saved() | fx.Taken():
                self._handle(frame)
            case CopyMade():
                self._copied(frame)
            case VersionTaken(slot, adopted, epoch):
                self._take_adoption(slot, adopted, epoch)
            case SlotFreed(slot, incoming):
                assert self._bodies is not None
                self._bodies.freed(slot, incoming)
            case StateCopyMade():
                assert self._states is not None
                self._states.copied(frame)
            case Goodbye(reason):
                self._leave(reason)

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
            self._channel, self._link, self._start, self._handle, _say, self._tasks, direct=self._direct
        )
        self._tasks.create_task(self._connect(self._link))

    async def _connect(self, link: SyncerConnection) -> None:
        """Once the kernels are there: a pull that has to wait for them would hold up the event loop, and whoever is
        part of a run and says nothing for some seconds is taken for dead."""
        assert self._kernels is not None
        await asyncio.wait([self._kernels])
        await link.run()

    def _open_box(self, frame: MailboxReady) -> None:
        """The training process has made the shared memory, or hands it to the successor of a dead courier."""
        assert self._start is not None
        assert self._machine is not None
        assert self._tasks is not None
        fd = self._channel.take_descriptor()
        if self._bodies is not None:
            self._bodies.retire()
        self._made_for = frame.settings
        self._machine.keeps_feedback = make_codec(frame.settings.codec).needs_feedback
        self._plan = make_plan(self._start.tensors, frame.settings.fragments, frame.settings.plan)
        layout = Layout.of(self._plan, frame.settings, on_device=frame.on_device)
        self._box = box = Mailbox(fd, layout, self._plan)
        if self._link is None:
            self._unsure = set() if frame.sure else set(range(len(self._plan.fragments)))
            whole = [int(v) if v == b else -1 for v, b in zip(box.adopted, box.base_version, strict=True)]
            counted = [int(v) for v in box.adopted]
            incarnation = box.count("incarnation")
            waits, term = frame.waits, box.count("term")
            self._machine.restore(box.run, whole, frame.stepped, incarnation, counted, seeking=waits, term=term)
            self._dial()
        assert self._link is not None
        self._bodies = FragmentTransfers(box, self._link, frame.settings, self._start, self._handle, self._tasks)
        self._handle(frame.stepped)  # its counters are those of this memory
        while self._held:
            self._deliver(self._held.popleft())

    def _copied(self, frame: CopyMade) -> None:
        assert self._bodies is not None
        if frame.epoch != self._epoch:
            self._bodies.freed(frame.slot, incoming=False)
            return
        made = (frame.steps, frame.tokens, frame.feedback)
        self._bodies.outgoing.add_copy(frame.fragment, frame.t, frame.slot, *made)
        counters = (frame.t, frame.steps, frame.tokens, frame.base, frame.total, frame.position)
        self._handle(fx.Copied(frame.round, frame.fragment, *counters))

    def _take_adoption(self, slot: int, adopted: fx.Adopted, epoch: int) -> None:
        assert self._bodies is not None
        if epoch != self._epoch:
            self._bodies.freed(slot, incoming=True)
            return
        copying = self._bodies.into_base(slot, adopted.fragment, adopted.version)
        if copying is None:
            self._adopted(adopted)
        else:
            assert self._tasks is not None
            self._copying_base = True
            self._tasks.create_task(self._await_base(copying, adopted, epoch))

    async def _await_base(self, copying: asyncio.Task[None], adopted: fx.Adopted, epoch: int) -> None:
        await copying
        self._copying_base = False
        if epoch == self._epoch:
            self._adopted(adopted)
        elif self._box is not None:
            self._box.base_version[adopted.fragment] = -1  # all was forgotten meanwhile
        if not self._over.is_set():
            self._run_callback(self._readable)

    def _adopted(self, adopted: fx.Adopted) -> None:
        self._unsure.discard(adopted.fragment)
        self._handle(adopted)

    # ---- from the syncer ----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        assert self._machine is not None
        return self._machine.hello()

    def _message(self, message: FromSyncer) -> None:
        if isinstance(message, Welcome):
            known = (
                message.fingerprint,
                message.incarnation,
                message.versions,
                message.index,
                message.frozen,
                message.run,
            )
            self._channel.send(Welcomed(message.settings, *known))
            if not self._fits(message):
                self._box = None
        if self._box is None and not isinstance(message, Refused):
            self._held.append(message)
        else:
            self._deliver(message)

    def _deliver(self, message: FromSyncer) -> None:
        self._handle(fx.Arrived(message))
        if isinstance(message, Welcome) and self._box is not None:
            self._box.run = message.run
            self._box.set_count("incarnation", message.incarnation)
            self._box.set_count("term", message.term)
        elif isinstance(message, Recover) and self._box is not None:
            self._box.set_count("incarnation", message.incarnation)
        elif isinstance(message, SettingsChanged):
            self._channel.send(SettingsTold(message.settings))

    def _fits(self, welcome: Welcome) -> bool:
        """Whether the shared memory serves this run. If not, the training process makes it anew."""
        if self._box is None or self._plan is None or self._made_for is None:
            return False
        same_plan = self._plan.fingerprint == welcome.fingerprint
        return same_plan and serves(self._made_for, welcome.settings)

    def _lost(self, reason: str) -> None:
        self._held.clear()
        if self._box is not None:
            self._handle(fx.Disconnected(reason))
            return
        self._channel.send(DialFailed(reason))
        if self._loop.time() - self._said_at >= SAY_S:
            self._said_at = self._loop.time()
            _say(f"the syncer is out of reach ({reason}); dialling again")

    # ---- the machine --------------------------------------------------------------------------------------------

    def _handle(self, event: fx.LearnerEvent) -> None:
        if self._machine is None or self._over.is_set():
            return
        for effect in self._machine.handle(self._loop.time(), event):
            self._carry_out(effect)
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
                _say(text)
            case fx.Save() | fx.Supply() | fx.AskToLeave():
                self._channel.send(effect)
            case fx.Inform(progress, global_step, committed):
                self._unsent_progress = RunProgress(committed, progress, global_step)
            case fx.HangUp(reason):
                if self._link is not None:
                    self._link.hang_up(reason)
            case fx.Stop(reason, final, failed):
                self._channel.send(StopOrder(reason, final, failed, mistake=failed))
            case _:
                if self._box is not None and self._bodies is not None:
                    self._order(effect, self._box, self._bodies)

    def _order(self, effect: fx.LearnerEffect, box: Mailbox, bodies: FragmentTransfers) -> None:
        """Effects that concern the shared memory."""
        assert self._machine is not None
        send, settings = self._channel.send, self._machine.settings
        match effect:
            case fx.Read(number, fragment, step):
                urgent = settings.synchronous or step <= self._machine.t
                if (slot := bodies.outgoing.take_slot(urgent=urgent)) is not None:
                    send(ReadOrder(slot, number, fragment, step))
            case fx.CancelRead() | fx.LetGo():
                send(effect)
            case fx.Hold(number, step):
                send(HoldOrder(number, schedule.fragment_of(number, settings), step))
            case fx.Adopt():
                send(self._adopt_order(effect, bodies))
            case fx.Own():
                box.base_version[:] = 0
                send(effect)
            case fx.Forget(_, reset):
                self._epoch += 1
                box.base_version[:] = -1
                bodies.outgoing.clear()
                bodies.feedback.forget_all()
                send(ForgetOrder(self._epoch, reset))
            case fx.Fetch(fragment, _):
                bodies.fetch(fragment)
            case fx.Upload(number, attempt, fragment):
                bodies.upload(number, attempt, fragment)
            case fx.Settle(fragment, version, t):
                bodies.feedback.settle(fragment, version, t)
            case fx.DropRests(fragment):
                bodies.feedback.drop_rests(fragment)
            case fx.UploadAll():
                bodies.upload_all()
            case fx.Drop(fragment, t):
                bodies.outgoing.drop(fragment, t)

    def _tell_progress(self) -> None:
        """To a training process that reads nothing for a while (one long step) only the newest is sent: what waits for
        it does not grow with the rounds."""
        if self._unsent_progress is not None and not self._channel.clogged:
            self._channel.send(self._unsent_progress)
            self._unsent_progress = None

    def _adopt_order(self, adopt: fx.Adopt, bodies: FragmentTransfers) -> AdoptOrder:
        """Carry becomes overwrite where the copy is gone, or where a dead courier may have known more."""
        assert self._machine is not None
        rule, minus, steps, tokens = adopt.rule, BASE, 0, 0
        if adopt.fragment in self._unsure and rule == "carry":
            rule = "overwrite"
        if rule == "carry" and adopt.copy_t is not None:
            if (copy := bodies.outgoing.name(adopt.fragment, adopt.copy_t)) is not None:
                minus, steps, tokens = copy
            else:
                _say(f"the copy to carry on from is gone: fragment {adopt.fragment} is overwritten this once")
                rule = "overwrite"
        slot = bodies.incoming.landed.pop(adopt.fragment)
        return AdoptOrder(
            slot=slot,
            fragment=adopt.fragment,
            version=adopt.version,
            round=adopt.round,
            rule=rule,
            blend=self._machine.settings.blend,
            step=adopt.step,
            minus=minus,
            minus_steps=steps,
            minus_tokens=tokens,
            held_tokens=adopt.held_tokens,
            copy_t=adopt.copy_t if rule == "carry" and minus != BASE and adopt.copy_t is not None else -1,
            # Carry needs the own moments as they were read with the copy: who was in no round takes none.
            moments=slot in bodies.incoming.with_moments and (rule != "carry" or minus != BASE),
        )

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        if self._over.is_set():
            return
        if self._link is not None:
            for word in self._machine.make_goodbye(reason) if self._machine else [Leave(reason=reason)]:
                self._link.send(word)
        self._over.set()

    async def _watch_parent(self) -> None:
        """A worker forked off the training process may keep its socket open, so watch the parent pid as well."""
        while True:
            await asyncio.sleep(PARENT_CHECK_S)
            if os.getppid() != self._parent:
                self._leave("its training process died")


def _say(text: str) -> None:
    print(f"courier: {text}", file=sys.stderr, flush=True)


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process; we end with it
    channel = CourierChannel(socket.socket(fileno=fd))

    async def run() -> None:
        await Courier(channel, direct=os.environ.get("ATOLL_DIRECT", "1") != "0").run()

    code = 0
    try:
        asyncio.run(run())
    except* AtollError as errors:
        _say(str(errors.exceptions[0]))
        code = 1
    return code
