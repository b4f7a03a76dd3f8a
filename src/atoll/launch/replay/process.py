"""One training process of a replay: started as in the run, then given the recorded actions step by step.

This code takes the courier's place: it sends the same frames over the same kind of socket and shares the same memory.
The process trains up to the step of its next action and waits there, perhaps for a version that others must make first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from atoll.courier.body import as_held
from atoll.launch.children import LAST_S, Child
from atoll.launch.replay.recording import ALONE, LOST, ProcessRecording, RecordedAction, RecordedCopy
from atoll.mailbox.box import BoxLayout, Mailbox
from atoll.mailbox.channel import (
    BASE,
    AdoptOrder,
    CopyMade,
    CourierChannel,
    ForgetOrder,
    Goodbye,
    GoOrder,
    MailboxReady,
    ReadOrder,
    RunProgress,
    Start,
    StateCopyMade,
    StepReport,
    StopOrder,
    TakeOrder,
    ToCourier,
    VersionTaken,
    Welcomed,
    decode_to_courier,
)
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, Delta, body_nbytes, decode_contribution, encode_contribution
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.moments import read_moments
from atoll.numerics.shard_plan import ShardPlan
from atoll.protocol import tape
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Range
from atoll.protocol.settings import Settings

OVER = "the replay is over"


@dataclass(frozen=True)
class SharedState:
    """A learner's state for newcomers, in memory of its own."""

    fd: int
    size: int


class GivenContribution(NamedTuple):
    delta: FloatArray
    moments: ByteArray | None
    """None: they are not shared."""
    made: CopyMade | None = None
    """Counters of its copy. None: several ranks gave it, and each has its own."""
    loss: float | None = None
    """Training loss of the learner's newest report."""


class LastCounters(NamedTuple):
    """Counters of a training process when its part was over, as its last report tells them."""

    t: int
    total: int
    tokens: tuple[int, ...]
    dropped: tuple[int, ...]
    missed: tuple[int, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class ReplayServices:
    """What all actors share."""

    plan: FragmentPlan
    """Of what the process holds …"""
    fingerprint: str
    """… and that of the whole model's."""
    sent: Callable[[int], Fragment]
    """Of a fragment, the pieces that it sends: the front of what it holds."""
    settings: Settings
    codec: Codec
    version: Callable[[int, int], FloatArray | None]
    """A fragment's values as of a version; None: not there yet."""
    adopted: Callable[[int, int], None]
    moments: Callable[[int, int], ByteArray | None]
    """The averaged moments of that version; None: they cannot be made again."""
    given: Callable[[RecordedCopy, str, GivenContribution], None]
    """A contribution: the copy it is of, and whose."""
    owned: Callable[[list[FloatArray]], None]
    """The first parameters."""
    state: Callable[[str], SharedState | None]
    lent: Callable[[ProcessRecording, int, SharedState], None]
    leases: Callable[[int], Range]
    progress: Callable[[int], float]
    """How much of the budget was spent, by the rounds behind the run …"""
    global_step: Callable[[int], int]
    """… and the run's step."""
    remark: Callable[[str], None]
    ranks: bool = False
    """It is one of several ranks."""
    shards: ShardPlan | None = None
    """Of a syncer of several."""

    def can_give(self, copy: RecordedCopy) -> bool:
        """Not where it needs feedback that cannot be made again."""
        return copy.feedback != LOST or not self.codec.needs_feedback


class ReplayedProcess:
    def __init__(self, part: ProcessRecording, acts: list[RecordedAction], child: Child) -> None:
        self.part, self.child = part, child
        self._shared: ReplayServices | None = None
        self._acts = acts
        self._next = 0
        self._channel: CourierChannel | None = None
        self._box: Mailbox | None = None
        self._epoch = 0
        self._at: int | None = None
        """The step after which it waits; None: it trains, or has not begun."""
        self._until = 0
        """How far it was told to train."""
        self._asked_to_stop = self._stopped = False
        self._waits_for = ""
        """An answer that must come before the next act."""
        self._registered = False
        self._supplies: list[fx.Supply] = []
        self._copies: dict[tuple[int, int], tuple[int, int, int]] = {}
        """carry: fragment and step → slot, steps and tokens of a copy that may be carried on from."""
        self._rests: dict[int, tuple[int, FloatArray]] = {}
        """Per fragment, what its last copy left out, and which round that was for; where the codec needs feedback."""
        self._reading: RecordedCopy | None = None
        self._adopts_moments = False
        """The next adoption takes the averaged moments of its version too."""
        self._stepped: fx.Stepped | None = None
        """Its last report."""
        self._free = 0
        self._end_by = inf

    # ---- what the conductor asks ----------------------------------------------------------------------------------

    @property
    def played(self) -> bool:
        """Its part is over."""
        return self._next == len(self._acts) and not self._waits_for

    @property
    def resting(self) -> bool:
        """It waits after a step, and nothing is on its way to or from it."""
        return self._at is not None and not self._waits_for

    @property
    def ending(self) -> bool:
        """It was told that nothing more is asked of it: a script may have something to do after the run."""
        return self._end_by < inf

    @property
    def next_act(self) -> RecordedAction | None:
        return self._acts[self._next] if self._next < len(self._acts) else None

    @property
    def last_counters(self) -> LastCounters | None:
        """None: it has not begun."""
        box, stepped = self._box, self._stepped
        if box is None or stepped is None:
            return None
        rows = (box.tokens, box.dropped, box.missed, box.adopted)
        return LastCounters(stepped.t, stepped.tokens_total, *(tuple(row.tolist()) for row in rows))

    @property
    def _replay(self) -> ReplayServices:
        assert self._shared is not None
        return self._shared

    @property
    def acts_done(self) -> int:
        return self._next

    def connect(self, channel: CourierChannel, start: Start, replay: ReplayServices) -> ReplayedProcess:
        """The process that is at the other end of this channel."""
        self._channel, self._shared = channel, replay
        if not start.boxed:
            settings, fingerprint = self._replay.settings, self._replay.fingerprint
            part, none = self.part, (-1,) * settings.fragments
            channel.send(Welcomed(settings, fingerprint, part.incarnation, none, part.index))
        return self

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def channel(self) -> CourierChannel:
        assert self._channel is not None
        return self._channel

    def act(self) -> Iterator[str]:
        """Everything that can be done now; the reason why it does not go on, if it has to wait for others."""
        while self.resting and (act := self.next_act) is not None:
            assert self._at is not None
            if act.t > self._at:
                return
            if (reason := self._perform_action(act)) is not None:
                yield reason
                return
            self._next += 1

    @property
    def wants_to_go(self) -> bool:
        act = self.next_act
        return self.resting and not self._stopped and act is not None and self._at is not None and act.t > self._at

    def go(self) -> None:
        """Train until the step of the next act is done."""
        act = self.next_act
        assert act is not None and self._at is not None
        self._at, self._until = None, act.t
        self.channel.send(GoOrder(act.t))

    def end(self) -> None:
        """Nothing more is asked of it."""
        now = time.monotonic()
        if self._channel is None or not (self._asked_to_stop or self._stopped) or now > self._end_by:
            self.child.kill_all()
        elif not self.ending:
            self._end_by = now + LAST_S
            self.channel.send(StopOrder(OVER, final=True))

    # ---- acts -----------------------------------------------------------------------------------------------------

    def _perform_action(self, act: RecordedAction) -> str | None:
        """None: done, or under way with an answer to wait for."""
        assert self._box is not None
        send = self.channel.send
        match act:
            case RecordedCopy():
                return self._order_copy(act)
            case tape.AdoptedEntry():
                return self._adopt_version(act)
            case tape.MomentsEntry():
                self._adopts_moments = True
            case tape.InformedEntry():
                send(self._make_progress(act))
            case tape.SuppliedEntry(_, leases, over, own):
                ranges = tuple(self._replay.leases(lease) for lease in leases)
                self._supply_leases(fx.Supply(ranges, over, "its data was its own in the run" if own else ""))
            case tape.OwnedEntry():
                self._replay.owned([self._box.base(f) for f in range(self._box.layout.fragments)])
                self._box.base_version[:] = 0
                send(fx.Own())
            case tape.ForgotEntry(_, reset):
                self._epoch += 1
                self._box.base_version[:] = -1
                self._copies.clear()
                send(ForgetOrder(self._epoch, reset))
            case tape.GaveEntry():
                send(fx.Capture(self._next))
                self._waits_for = "its state"
            case tape.TookEntry(_, ticket):
                return self._take_state(ticket)
            case tape.StoppedEntry():
                self._asked_to_stop = True
                send(StopOrder("as in the run", final=False))
            case tape.BeganEntry() | tape.MarkedEntry():
                pass
        return None

    def _make_progress(self, act: tape.InformedEntry) -> RunProgress:
        if act.progress is not None:
            return RunProgress(act.committed, act.progress, act.global_step)
        progress, step = self._replay.progress(act.committed), self._replay.global_step(act.committed)
        return RunProgress(act.committed, progress, step)

    def _order_copy(self, act: RecordedCopy) -> str | None:
        assert self._box is not None
        held = int(self._box.adopted[act.fragment])
        if held != act.base:
            return f"it holds version {held} of fragment {act.fragment}, round {act.round} was made on {act.base}"
        self._reading, self._waits_for = act, "a copy"
        slots = self._box.layout.most_outgoing  # as many rounds may have been under way
        taken = {slot for slot, _, _ in self._copies.values()}
        self._free = next(slot for slot in range(slots) if slot not in taken)
        self.channel.send(ReadOrder(self._free, act.round, act.fragment, act.t))
        return None

    def _adopt_version(self, act: tape.AdoptedEntry) -> str | None:
        assert self._box is not None
        values = self._replay.version(act.fragment, act.version)
        if values is None:
            return f"version {act.version} of fragment {act.fragment} is not there"
        landed = self._box.incoming(0, act.fragment)
        np.copyto(landed, values)
        as_held(self._box.plan.fragments[act.fragment], landed)
        if self._adopts_moments:
            if (averaged := self._replay.moments(act.fragment, act.version)) is None:
                return f"the averaged moments of version {act.version} of fragment {act.fragment} are not there"
            self._box.incoming_moments(0)[: averaged.size] = averaged
        slot, steps, tokens = BASE, 0, 0
        if act.copy_t >= 0:
            if (copy := self._copies.get((act.fragment, act.copy_t))) is None:
                return f"the copy of fragment {act.fragment} after step {act.copy_t} is not there"
            slot, steps, tokens = copy
        self._waits_for = "an adoption"
        self.channel.send(
            AdoptOrder(
                slot=0,
                fragment=act.fragment,
                version=act.version,
                round=-1,
                rule=tape.whole_rule(act.rule),
                blend=self._replay.settings.blend,
                step=0,
                minus=slot,
                minus_steps=steps,
                minus_tokens=tokens,
                copy_t=act.copy_t,
                moments=self._adopts_moments,
            )
        )
        self._adopts_moments = False
        return None

    def _take_state(self, ticket: str) -> str | None:
        if (state := self._replay.state(ticket)) is None:
            return "the state of a peer is not there"
        self._waits_for = "that it took a peer's state"
        self.channel.send(TakeOrder(ticket, state.size), state.fd)
        return None

    def _supply_leases(self, supplies: fx.Supply) -> None:
        """A script asks for its data once it has joined: what comes before that waits."""
        if self._registered:
            self.channel.send(supplies)
        else:
            self._supplies.append(supplies)

    # ---- what it says -----------------------------------------------------------------------------------------------

    def receive(self) -> None:
        self.hear(self.channel.receive())
        self.channel.flush()

    def hear(self, frames: Iterable[bytes]) -> None:
        for data in frames:
            self._handle_frame(decode_to_courier(data))

    def _handle_frame(self, frame: ToCourier) -> None:
        match frame:
            case MailboxReady(settings, stepped):
                fd = self.channel.take_descriptor()
                assert not frame.on_device, "a replay encodes by itself, so its learners choose placement host"
                plan = self._replay.plan
                self._box = Mailbox(fd, BoxLayout.of(plan, settings, ranks=self._replay.ranks), plan)
                os.close(fd)
                self._at, self._stepped = stepped.t, stepped
            case StepReport(stepped):
                self._stopped, self._stepped = stepped.stopped, stepped
                if stepped.stopped or stepped.t >= self._until:
                    self._at = stepped.t
            case fx.Registered():
                self._registered = True
                for supplies in self._supplies:
                    self.channel.send(supplies)
                self._supplies = []
            case CopyMade():
                self._take_copy(frame)
            case VersionTaken(_, adopted):
                self._take_answer(adopted.fragment, adopted.version)
            case StateCopyMade(size=size, reason=reason):
                assert not reason, reason
                self._waits_for = ""
                self._replay.lent(self.part, frame.t, SharedState(self.channel.take_descriptor(), size))
            case fx.Taken(reason=reason):
                assert not reason, reason
                self._waits_for = ""
            case fx.Told(_, entries):
                self._compare_machine(entries)
            case Goodbye():
                self._stopped = True
            case _:
                pass

    def _take_copy(self, frame: CopyMade) -> None:
        assert self._box is not None and self._reading is not None
        act = self._reading
        if self._replay.settings.may_carry:
            self._copies[frame.fragment, frame.t] = (frame.slot, frame.steps, frame.tokens)
        self._reading, self._waits_for = None, ""
        if frame.steps != act.steps:
            text = f"{self.part.learner} made {frame.steps} steps for round {act.round}, in the run {act.steps}"
            self._replay.remark(text)
        if self._replay.can_give(act):
            front = slice(0, self._replay.sent(frame.fragment).size)
            copied = self._box.outgoing(frame.slot, frame.fragment)
            delta = Delta(self._box.base(frame.fragment)[front], copied[front])
            loss = self._stepped.loss if self._stepped is not None else None
            given = GivenContribution(self._encode_copy(act, delta), self._copy_moments(frame), frame, loss)
            self._replay.given(act, self.part.learner, given)

    def _copy_moments(self, frame: CopyMade) -> ByteArray | None:
        assert self._box is not None
        if not self._replay.settings.shares_moments:
            return None
        part = self._replay.plan.fragments[frame.fragment]
        return read_moments(part, self._box.outgoing_moments(frame.slot)).copy()

    def _encode_copy(self, act: RecordedCopy, delta: Delta) -> FloatArray:
        """What arrives of it."""
        codec, part = self._replay.codec, self._replay.sent(act.fragment)
        if codec.needs_feedback:
            number, rest = self._rests.get(act.fragment, (ALONE, None))
            assert act.feedback in (ALONE, number), "a process's copies are made again in their order"
            delta = delta._replace(feedback=None if act.feedback == ALONE else rest, rest=np.empty_like(delta.base))
        encoded, arrived = np.empty(body_nbytes(codec, part), dtype=np.uint8), np.empty_like(delta.base)
        encode_contribution(codec, part, delta, encoded)
        decode_contribution(codec, part, encoded, arrived)
        if delta.rest is not None:
            self._rests[act.fragment] = (act.round, delta.rest)
        return arrived

    def _take_answer(self, fragment: int, version: int) -> None:
        assert self._box is not None
        np.copyto(self._box.base(fragment), self._box.incoming(0, fragment))
        self._box.base_version[fragment] = version
        for key in [key for key in self._copies if key[0] == fragment]:
            del self._copies[key]
        self._waits_for = ""
        self._replay.adopted(fragment, version)

    def _compare_machine(self, entries: tuple[tape.AnyEntry, ...]) -> None:
        then = self.part.began
        for now in entries:
            if isinstance(now, tape.BeganEntry) and then is not None and then.torch:
                for name in ("threads", "torch", "cpu", "device"):
                    if getattr(now, name) != getattr(then, name):
                        text = f"{name}: {getattr(then, name)} in the run, {getattr(now, name)} here"
                        self._replay.remark(f"{self.part.learner} may differ, {text}")
