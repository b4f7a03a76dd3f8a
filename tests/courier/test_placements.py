"""Both placements give the same bodies and models, bit for bit, whatever happens between copies and answers.

Two learners with equal parameters go through one course, each with its own shared memory and its own courier's part;
the test plays the state machine and the syncer, by the rules of protocol/learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.courier.test_body import FakeLink
from tests.learner.small import DTYPES, Remembers, boxed

from atoll.choices import CODEC
from atoll.courier.body import FragmentTransfers, as_held
from atoll.courier.slots import make_adopt_order
from atoll.learner.boundary import Boundary
from atoll.learner.device_offload import DeviceOffload, KeptCopy
from atoll.mailbox.channel import (
    BASE,
    AdoptOrder,
    CopyMade,
    ForgetOrder,
    ReadOrder,
    SlotFreed,
    Start,
    VersionTaken,
)
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import TensorSpec

FRAGMENTS = 3


def model() -> dict[str, torch.Tensor]:
    """Several dtypes, blocks that are whole and blocks that are not, and a merged buffer."""
    torch.manual_seed(1)
    return {
        "a": torch.randn(5, 70),
        "b": torch.randn(1100).bfloat16(),
        "c": torch.randn(4, 128).half(),
        "buffers/mean/norm.running_var": torch.rand(7),
    }


class Side:
    """A learner of one placement, and its courier's part."""

    def __init__(self, codec: str, tasks: asyncio.TaskGroup, *, on_device: bool) -> None:
        self.w = model()
        self.box, self.settings = boxed(self.w, FRAGMENTS, on_device=on_device, codec=codec)
        self.training = Remembers()
        self.boundary = Boundary(self.box, self.settings, self.w, self.training)  # type: ignore[arg-type]
        self.tasks, self.link = tasks, FakeLink()
        self.events: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        self.t = 0
        self.at_hand: dict[int, CopyMade] = {}
        self.unsure: set[int] = set()
        self.hire()
        self.boundary.carry_out(fx.Own())
        self.box.base_version[:] = 0

    def hire(self) -> None:
        tensors = tuple(TensorSpec(name, tuple(p.shape), DTYPES[p.dtype]) for name, p in self.w.items())
        start = Start("learner-0", "session", "", tensors)
        told = (self.link, self.settings, start, self.events.put_nowait, self.tasks)
        self.bodies = FragmentTransfers(self.box, *told)  # type: ignore[arg-type]
        self.at_hand.clear()

    def step(self, change: dict[str, torch.Tensor]) -> None:
        self.t += 1
        for name, values in change.items():
            self.w[name] += values.to(self.w[name].dtype)
        self.boundary.count_step(self.t, 10)

    def copy(self, fragment: int) -> None:
        slot = self.bodies.outgoing.take_slot(urgent=True)
        assert slot is not None
        self.boundary.carry_out(ReadOrder(slot, fragment, fragment, self.t))
        self.boundary.make_copies(self.t)
        self.boundary.settle()
        self.listen()

    def listen(self) -> None:
        for frame in self.training.told():
            match frame:
                case CopyMade():
                    self.bodies.encoded_with[frame.slot] = frame.feedback
                    self.bodies.outgoing.add_copy(frame.fragment, frame.t, frame.slot, frame.steps, frame.tokens)
                    old = self.at_hand.get(frame.fragment)
                    if old is not None and old.t != frame.t:
                        self.bodies.outgoing.drop(old.fragment, old.t)
                    self.at_hand[frame.fragment] = frame
                case VersionTaken(slot, adopted):
                    self.bodies.into_base(slot, adopted.fragment, adopted.version)
                    self.bodies.finish_adoption(slot, adopted.fragment)
                case SlotFreed(slot, incoming):
                    self.bodies.freed(slot, incoming)

    async def answer(self, fragment: int, number: int, attempt: int) -> bytes | str:
        """The body, or why there is none."""
        self.bodies.upload(number, attempt, fragment)
        async with asyncio.timeout(20):
            said = await self.events.get()
        return self.link.contributions[number, attempt] if isinstance(said, fx.Uploaded) else str(said)

    def adopt(self, adopt: fx.Adopt, values: np.ndarray) -> AdoptOrder:
        fragment = adopt.fragment
        slot = self.bodies.incoming.landed[fragment] = self.bodies.incoming._free.get_nowait()
        landed = self.box.incoming(slot, fragment)
        landed[:] = values
        as_held(self.box.plan.fragments[fragment], landed)
        slots = (self.bodies.outgoing, self.bodies.incoming)
        order = make_adopt_order(adopt, *slots, blend=0.5, unsure=fragment in self.unsure)
        self.boundary.carry_out(order)
        self.boundary.serve_orders()
        self.listen()
        self.unsure.discard(fragment)
        if (copy := self.at_hand.pop(fragment, None)) is not None:
            self.bodies.outgoing.drop(fragment, copy.t)
        return order

    def state(self) -> list[bytes]:
        """Every parameter and counter, as bytes."""
        rows = (self.box.steps, self.box.tokens, self.box.dropped, self.box.missed)
        values = [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in self.w.values()]
        return [*values, *(row.tobytes() for row in rows)]

    def forget(self, epoch: int) -> None:
        self.box.base_version[:] = -1
        self.bodies.outgoing.clear()
        self.bodies.feedback.forget_all()
        self.at_hand.clear()
        self.boundary.carry_out(ForgetOrder(epoch, reset=False))
        self.listen()

    def close(self) -> None:
        self.bodies.close()
        self.boundary.close()
        self.box.close()


@dataclass
class Pair:
    host: Side
    device: Side
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    versions: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    held: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    merged: list[tuple[int, int]] = field(default_factory=lambda: [(-1, -1)] * FRAGMENTS)
    """Per fragment, the version that holds its last contribution, and that one's step."""
    asked: dict[int, int] = field(default_factory=dict)
    """Fragment → step of an answer that may still be merged."""
    rule: str = "overwrite"
    """In force now."""
    frozen: list[str] = field(default_factory=lambda: ["overwrite"] * FRAGMENTS)
    """Per fragment, the rule that the round of its newest version was frozen under."""
    least: list[int] = field(default_factory=lambda: [-1] * FRAGMENTS)
    """Per fragment, the version that the run was last rolled back with."""
    answers: int = 0
    sent: int = 0
    epoch: int = 0
    carried: int = 0
    """Adoptions that subtracted a copy, and (below) the base."""
    carried_base: int = 0

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.host, self.device

    async def do(self, what: str, fragment: int) -> None:
        await getattr(self, what)(fragment)

    async def step(self, _: int = 0) -> None:
        spread = 10.0 ** self.rng.integers(-4, 1)
        change = {
            name: torch.from_numpy(spread * self.rng.standard_normal(tuple(p.shape)).astype(np.float32))
            for name, p in self.host.w.items()
        }
        for side in self.sides:
            side.step(change)

    async def copy(self, fragment: int) -> None:
        for side in self.sides:
            side.copy(fragment)

    async def answer(self, fragment: int) -> None:
        """A pull, as `Pulls.answer_pull` goes by it."""
        copy = self.host.at_hand.get(fragment)
        if self.merged[fragment][0] > self.held[fragment] or copy is None or copy.base != self.held[fragment]:
            return
        if copy.steps == 0:
            return
        self.answers += 1
        self.frozen[fragment] = self.rule
        bodies = [await side.answer(fragment, self.answers, 1) for side in self.sides]
        assert isinstance(bodies[0], bytes), bodies[0]
        if isinstance(bodies[1], bytes):
            self.sent += 1
            assert bodies[0] == bodies[1], f"fragment {fragment} after step {copy.t}"
            self.asked[fragment] = copy.t
        else:
            assert self.rolled_back(fragment), bodies[1]
            self.asked.pop(fragment, None)

    def rolled_back(self, fragment: int) -> bool:
        """Only a copy from before a rollback may be of no use; the syncer would not merge it either."""
        return self.merged[fragment] == (-1, -1) and self.held[fragment] < self.versions[fragment]

    async def commit(self, fragment: int) -> None:
        if (t := self.asked.pop(fragment, None)) is not None:
            self.versions[fragment] += 1
            self.merged[fragment] = (self.versions[fragment], t)
            for side in self.sides:
                side.bodies.feedback.settle(fragment, self.versions[fragment], t)
                side.bodies.feedback.drop_rests(fragment)

    async def miss(self, fragment: int) -> None:
        if fragment not in self.asked:
            self.frozen[fragment] = self.rule
        self.versions[fragment] += 1
        self.asked.pop(fragment, None)
        for side in self.sides:
            side.bodies.feedback.drop_rests(fragment)

    async def adopt(self, fragment: int) -> None:
        if self.versions[fragment] == self.held[fragment]:
            return
        size = self.host.box.plan.fragments[fragment].size
        values = self.rng.standard_normal(size).astype(np.float32)
        held, version, merged = self.held[fragment], self.versions[fragment], self.merged[fragment]
        plain = min(self.held) < 0 or held < self.least[fragment] <= version
        adopt = fx.Adopt(
            fragment=fragment,
            version=version,
            round=fragment,
            rule="overwrite" if plain else self.frozen[fragment],
            copy_t=merged[1] if held < merged[0] <= version else None,
        )
        orders = [side.adopt(adopt, values) for side in self.sides]
        assert orders[0] == orders[1]
        assert self.host.state() == self.device.state(), f"{orders[0]} leaves another model"
        self.carried += orders[0].rule == "carry" and orders[0].minus != BASE
        self.carried_base += orders[0].rule == "carry" and orders[0].minus == BASE
        self.held[fragment] = version

    async def set_adopt(self, _: int = 0) -> None:
        """`atoll set RUN adopt=…`, the other way each time."""
        self.rule = "carry" if self.rule == "overwrite" else "overwrite"

    async def new_courier(self, _: int) -> None:
        for side in self.sides:
            side.bodies.close()
            side.boundary.drop_orders()
            side.hire()
            side.unsure = set(range(FRAGMENTS))
        self.welcome()

    def welcome(self) -> None:
        for side in self.sides:
            for fragment, (version, t) in enumerate(self.merged):
                side.bodies.feedback.settle(fragment, version, t)

    async def forget(self, _: int) -> None:
        self.epoch += 1
        self.asked.clear()
        self.merged = [(-1, -1)] * FRAGMENTS
        for side in self.sides:
            side.forget(self.epoch)
        self.held = [-1] * FRAGMENTS
        for fragment in range(FRAGMENTS):
            await self.adopt(fragment)

    async def roll_back(self, _: int) -> None:
        self.asked.clear()
        self.versions = [version + 1 for version in self.versions]
        self.least = list(self.versions)
        self.merged = [(-1, -1)] * FRAGMENTS
        for fragment, version in enumerate(self.versions):
            for side in self.sides:
                side.bodies.feedback.settle(fragment, version, -1)
                side.bodies.feedback.drop_rests(fragment)


@asynccontextmanager
async def pair(codec: str, rule: str = "overwrite") -> AsyncIterator[Pair]:
    async with asyncio.TaskGroup() as tasks:
        made = Pair(Side(codec, tasks, on_device=False), Side(codec, tasks, on_device=True), rule=rule)
        yield made
        for side in made.sides:
            side.close()


ROUND = ["step", "copy", "answer", "commit", "adopt"]
USUAL = [*ROUND, *ROUND, "miss"]
RARE = ["new_courier", "forget", "roll_back", "set_adopt"]
courses = st.lists(st.tuples(st.sampled_from(USUAL * 2 + RARE), st.integers(0, FRAGMENTS - 1)), max_size=60)


@pytest.mark.parametrize("rule", ["overwrite", "carry"])
@pytest.mark.parametrize("codec", CODEC.names())
def test_bodies_and_models_are_equal_round_after_round(codec: str, rule: str) -> None:
    async def run() -> None:
        async with pair(codec, rule) as both:
            assert isinstance(both.device.boundary._offload, DeviceOffload)
            for number in range(12):
                fragment = number % FRAGMENTS
                for what in [*ROUND[:3], "miss" if number % 5 == 4 else "commit", "step", "copy", "adopt"]:
                    await both.do(what, fragment)
            assert both.sent == 12, "every answer was given, in both placements"
            assert (both.carried, both.carried_base) == ((10, 2) if rule == "carry" else (0, 0))

    asyncio.run(run())


@pytest.mark.parametrize("codec", ["bf16", "int4"])
@pytest.mark.parametrize("before", ["overwrite", "carry"])
def test_a_change_of_the_rule_with_copies_under_way(before: str, codec: str) -> None:
    """A round frozen before the change is adopted by the old rule, one after it by the new; no slot stays taken."""

    async def run() -> None:
        async with pair(codec, before) as both:
            for fragment in range(FRAGMENTS):
                for what in ["step", "copy"]:
                    await both.do(what, fragment)
            await both.answer(0)  # frozen and read before the change
            await both.set_adopt()
            for fragment in (1, 2):  # read before it, and frozen after it
                await both.answer(fragment)
            await both.step()
            for fragment in range(FRAGMENTS):
                await both.commit(fragment)
                await both.adopt(fragment)
            assert both.carried == (1 if before == "carry" else 2)
            for side in both.sides:
                steps = [0, 0, 0]
                for fragment in (0,) if before == "carry" else (1, 2):
                    steps[fragment] = 3 - fragment  # those since the copy
                assert side.box.steps.tolist() == steps
                assert len(side.bodies.outgoing.free) == side.box.layout.first_outgoing, "every slot is free again"
            assert not kept_copies(both.device), "no copy is kept beyond the adoption of its fragment"

    asyncio.run(run())


def kept_copies(side: Side) -> dict[int, KeptCopy]:
    offload = side.boundary._offload
    assert isinstance(offload, DeviceOffload)
    return offload._kept


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_what_copies_ahead_leave_out_is_kept_until_they_are_sent(codec: str) -> None:
    """A slow learner copies every fragment at each boundary, and is asked for them one after the other."""

    async def run() -> None:
        async with pair(codec) as both:
            for _ in range(4):
                for what in ROUND:
                    for fragment in range(FRAGMENTS if what != "step" else 1):
                        await both.do(what, fragment)
            assert both.sent == 4 * FRAGMENTS
            offload = both.device.boundary._offload
            assert isinstance(offload, DeviceOffload)
            slots = both.device.box.layout.first_outgoing
            assert len(offload._rests._held) <= FRAGMENTS + slots, "no more than was allocated at first"

    asyncio.run(run())


@pytest.mark.parametrize("rule", ["overwrite", "carry"])
@pytest.mark.parametrize("codec", ["bf16", "int4", "topk"])
@given(courses)
@settings(max_examples=25, deadline=None)
def test_bodies_and_models_are_equal_on_every_course(codec: str, rule: str, course: list[tuple[str, int]]) -> None:
    async def run() -> None:
        async with pair(codec, rule) as both:
            for what, fragment in course:
                await both.do(what, fragment)
            for fragment in range(FRAGMENTS):
                for what in ["adopt", *ROUND[:3]]:
                    await both.do(what, fragment)
            assert both.sent >= FRAGMENTS, "what was adopted last is what the last copies were made on"
            assert len(kept_copies(both.device)) <= both.device.box.layout.first_outgoing

    asyncio.run(run())


def test_a_copy_from_before_a_rollback_is_not_sent() -> None:
    """In placement host it would be encoded without feedback; here it has been encoded with it."""

    async def run() -> None:
        async with pair("topk") as both:
            for what in [*ROUND, "step", "copy", "roll_back"]:
                await both.do(what, 0)
            said = await both.device.answer(0, 99, 1)
            assert "its feedback has changed since it was copied" in said
            for what in ["adopt", "step", "copy", "answer"]:
                await both.do(what, 0)
            assert both.sent == 2

    asyncio.run(run())


@pytest.mark.parametrize("codec", CODEC.names())
def test_no_codec_makes_more_than_four_bytes_of_a_value(codec: str) -> None:
    """So a body fits into the slot of its fragment."""
    one = make_codec(codec)
    for width in range(1, 140):
        assert one.nbytes(((3, width), (1, 1))) <= 4 * (3 * width + 1)
    box, _ = boxed(model(), FRAGMENTS, on_device=True, codec=codec)
    for part in box.plan.fragments:
        assert body_nbytes(one, part) <= box.layout.slot_bytes
    box.close()
