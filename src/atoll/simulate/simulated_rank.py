"""One rank of a simulated learner of several: its training process, and the memory that this shares with its courier.

It carries out frames between two steps as learner/boundary.py does, on values of its own: what it holds of every
fragment. It does nothing that all ranks do not do after the same step. What it has done goes to its courier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.learner.meeting import Meeting, RankFacts
from atoll.mailbox.channel import (
    BASE,
    AdoptOrder,
    CopyMade,
    ForgetOrder,
    HoldOrder,
    ReadOrder,
    SlotFreed,
    StopOrder,
    ToTraining,
    VersionTaken,
)
from atoll.numerics.rank_plan import RankPlan
from atoll.protocol.learner import effects as fx
from atoll.protocol.statistics import after_adoption
from atoll.simulate.cells import Cells, front_of, take_part
from atoll.simulate.training import Payload

FromRank = CopyMade | SlotFreed | VersionTaken | fx.Saved


@dataclass(frozen=True, slots=True)
class ReadFact:
    """What a copy was made of: parts of one contribution agree on it."""

    fragment: int
    t: int
    base: int


@dataclass(frozen=True, slots=True)
class SentPart:
    """A rank's part of a contribution, as it left."""

    read: ReadFact
    values: Cells
    digest: str
    about: Payload
    """What the leader says of the whole; its Δ is not known before all parts are there."""


class RankWorld(Protocol):
    """What a rank needs of the learner around it."""

    t: int
    tokens_total: int

    @property
    def lease_position(self) -> int: ...

    def on_agreed(self, rank: int, frames: list[ToTraining]) -> None: ...

    def tell_courier(self, rank: int, frame: FromRank) -> None: ...

    def hear_order(self, frame: ToTraining) -> None: ...

    def watch_rank(self, rank: int, done: str) -> None: ...

    def watch_save(self, epoch: int, cut: int) -> None: ...

    def watch_final_stop(self, rank: int, adopted: Sequence[int]) -> None: ...

    def watch_rank_adoption(self, rank: int, order: AdoptOrder, dropped: int) -> None: ...


class SimulatedRank:
    def __init__(self, learner: RankWorld, rank: int, plan: RankPlan, first: list[Cells], tokens_per_step: int) -> None:
        self._learner, self.rank, self.plan = learner, rank, plan
        self.tokens_per_step = tokens_per_step
        """Of its own share of a batch."""
        fragments = len(first)
        self.meeting = Meeting()
        self.lag_s = 0.0
        """How late its courier is with everything."""
        self.theta = [take_part(plan, f, whole) for f, whole in enumerate(first)]
        self.base = list(self.theta)
        self.base_version = [-1] * fragments
        """The courier's: the version that Δ is taken against."""
        self.adopted = [-1] * fragments
        self.steps, self.tokens = [0] * fragments, [0] * fragments
        self.dropped, self.missed = [0] * fragments, [0] * fragments
        self.epoch = self.courier_epoch = 0
        """How many times the training process has forgotten, and its courier was told to."""
        self.reads: dict[int, ReadOrder] = {}
        self.holds: dict[int, HoldOrder] = {}
        self.arriving: list[AdoptOrder] = []
        self.outgoing: dict[int, tuple[ReadFact, Cells]] = {}
        self.incoming: dict[int, Cells] = {}
        """By slot."""

    def make_facts(self, stepped: bool) -> RankFacts:
        return self.meeting.make_facts(self.tokens_per_step if stepped else 0)

    def count_step(self, down: Cells) -> None:
        for f, value in enumerate(self.theta):
            self.theta[f] = value - take_part(self.plan, f, down)
            self.steps[f] += 1

    def add_tokens(self, tokens: int, *, of_this_life: bool) -> None:
        row = self.tokens if of_this_life else self.dropped
        for f in range(len(row)):
            row[f] += tokens

    # ---- its courier --------------------------------------------------------------------------------------------

    def take_frame(self, frame: ToTraining) -> None:
        """From the leader: what it means for the memory, before the training process has it."""
        match frame:
            case fx.Own():
                self.base_version[:] = [0] * len(self.base_version)
            case ForgetOrder(epoch=epoch):
                self.courier_epoch = epoch
                self.base_version[:] = [-1] * len(self.base_version)
            case _:
                pass
        self.meeting.add(frame)

    def take_into_base(self, taken: VersionTaken) -> None:
        if taken.epoch == self.courier_epoch:
            f = taken.adopted.fragment
            self.base[f], self.base_version[f] = self.incoming[taken.slot], taken.adopted.version

    def find_delta(self, fragment: int, slot: int, base: Cells) -> tuple[ReadFact, Cells]:
        """Of the copy in that slot: what it was made of, and what this rank sends."""
        read, copied = self.outgoing[slot]
        return read, front_of(self.plan, fragment, base - copied)

    # ---- its training process -------------------------------------------------------------------------------------

    def carry_out_agreed(self) -> None:
        frames = self.meeting.take_agreed()
        self._learner.on_agreed(self.rank, frames)
        for frame in frames:
            self._carry_out(frame)

    def _carry_out(self, frame: ToTraining) -> None:
        match frame:
            case ReadOrder():
                self._cancel_read(frame.round)
                self.reads[frame.round] = frame
            case fx.CancelRead(number):
                self._cancel_read(number)
            case AdoptOrder():
                self.arriving.append(frame)
            case HoldOrder():
                self.holds[frame.round] = frame
            case fx.LetGo(number):
                self.holds.pop(number, None)
            case fx.Own():
                self.adopted[:] = [0] * len(self.adopted)
            case ForgetOrder(epoch, reset):
                self._forget(epoch, reset)
            case fx.Save(cut):
                self._learner.watch_rank(self.rank, f"saves for cut {cut}")
                self._learner.watch_save(self.epoch, cut)
                self._learner.tell_courier(self.rank, fx.Saved(cut, self._learner.t, "file", "digest"))
            case StopOrder(final=True):
                self._learner.watch_final_stop(self.rank, self.adopted)
            case _:
                loop = StopOrder | fx.Supply | fx.AskToLeave | fx.HoldBack | fx.BeginTraining
                assert isinstance(frame, loop), frame
        if self.rank == 0:  # what concerns the loop and the data
            self._learner.hear_order(frame)

    def _cancel_read(self, number: int) -> None:
        if (order := self.reads.pop(number, None)) is not None:
            self._learner.tell_courier(self.rank, SlotFreed(order.slot, incoming=False))

    def _forget(self, epoch: int, reset: bool) -> None:
        self.epoch = epoch
        self.adopted[:] = [-1] * len(self.adopted)
        for row in (self.steps, self.tokens, self.dropped, self.missed):
            row[:] = [0] * len(row)
        for number in list(self.reads):
            self._cancel_read(number)
        for order in self.arriving:
            self._learner.tell_courier(self.rank, SlotFreed(order.slot, incoming=True))
        self.arriving.clear()
        self.holds.clear()
        if reset:
            self.theta[:] = self.base

    def make_copies(self, t: int, *, stopped: bool) -> None:
        for number, order in sorted(self.reads.items()):
            if order.step <= t or stopped:
                del self.reads[number]
                self._copy(order, t)

    def _copy(self, order: ReadOrder, t: int) -> None:
        f = order.fragment
        self.outgoing[order.slot] = ReadFact(f, t, self.adopted[f]), self.theta[f]
        self._learner.watch_rank(self.rank, f"reads fragment {f} for round {order.round}")
        counters = (self.steps[f], self.tokens[f], self.adopted[f], self.epoch)
        learner = self._learner
        made = CopyMade(order.slot, order.round, f, t, *counters, learner.tokens_total, learner.lease_position)
        learner.tell_courier(self.rank, made)

    def holding(self, t: int, fragment: int | None = None) -> bool:
        return any(hold.step <= t and fragment in (None, hold.fragment) for hold in self.holds.values())

    def adopt_ready(self, t: int, *, stopped: bool) -> None:
        for order in list(self.arriving):
            if order.step <= t or stopped or self.holding(t, order.fragment):
                self.arriving.remove(order)
                self._adopt(order, t)

    def _adopt(self, order: AdoptOrder, t: int) -> None:
        f, own, arrived = order.fragment, self.theta[order.fragment], self.incoming[order.slot]
        steps = tokens = 0
        if order.rule == "blend":
            self.theta[f] = order.blend * own + (1 - order.blend) * arrived
        elif order.rule == "carry":
            read = self.base[f] if order.minus == BASE else self.outgoing[order.minus][1]
            self.theta[f] = arrived + own - read
            steps, tokens = self.steps[f] - order.minus_steps, self.tokens[f] - order.minus_tokens
        else:
            self.theta[f] = arrived
        counters = (self.dropped[f], self.missed[f])
        dropped, missed = after_adoption(self.tokens[f], order.held_tokens, tokens, *counters)
        self._learner.watch_rank(self.rank, f"adopts version {order.version} of fragment {f} by {order.rule}")
        self._learner.watch_rank_adoption(self.rank, order, dropped)
        self.dropped[f], self.missed[f] = dropped, missed
        self.steps[f], self.tokens[f], self.adopted[f] = steps, tokens, order.version
        for number in [n for n, hold in self.holds.items() if hold.fragment == f and n <= order.round]:
            del self.holds[number]
        adopted = fx.Adopted(f, order.version, t, steps, tokens, dropped, missed)
        self._learner.tell_courier(self.rank, VersionTaken(order.slot, adopted, self.epoch))
