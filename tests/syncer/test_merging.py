"""Contributions from the inbox to a version: the filter's verdicts, with and without `robust`."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.syncer.conftest import plan

from atoll.config import Outer
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.screen import Screen
from atoll.protocol import effects as fx
from atoll.protocol.messages import TensorSpec
from atoll.syncer.inbox import Inbox
from atoll.syncer.merging import Merging
from atoll.syncer.parameters import Parameters

LARGE = (TensorSpec("one", (64, 64), "float32"), TensorSpec("two", (64, 64), "float32"))
NAMES = ("a", "b", "c", "d")


class Bench:
    """A syncer's merging part, with four learners of which the last gives the opposite of what it should."""

    def __init__(self, *, robust: bool) -> None:
        self.plan = plan(LARGE)
        self.parameters = Parameters(self.plan, Outer(robust=robust))
        self.parameters.begin()
        self.inbox, self.told = Inbox(self.plan, make_codec("fp32")), []
        screen = Screen(self.plan)
        self.merging = Merging(self.parameters, self.inbox, screen, robust, self.told.append, lambda work: work.close())
        self._dice = np.random.default_rng(0)

    def deltas(self, fragment: int) -> list[FloatArray]:
        size = self.plan.fragments[fragment].size
        common = self._dice.standard_normal(size)
        given = [(common + self._dice.standard_normal(size)).astype(np.float32) for _ in NAMES]
        return [*given[:3], -given[3]]

    async def round(self, number: int) -> tuple[fx.Merged, list[FloatArray]]:
        fragment, parts = number % 2, []
        deltas = self.deltas(fragment)
        for name, delta in zip(NAMES, deltas, strict=True):
            key = (name, number, 1)
            self.inbox.ask(key, fragment)
            body = np.frombuffer(self.inbox.receive(key), np.uint8)
            body[:] = delta.view(np.uint8)
            self.inbox.arrived(key, "mark")
            self.inbox.open(key, "mark")
            parts.append(fx.Part(name, 1, 1.0))
        self.merging.merge(fx.Merge(number, fragment, tuple(parts)))
        await asyncio.sleep(0)
        merged = self.told.pop()
        assert isinstance(merged, fx.Merged)
        self.parameters.commit(fragment, number // 2 + 1, number)
        return merged, deltas


async def test_with_robust_what_points_against_the_others_is_left_out_and_written_down() -> None:
    bench = Bench(robust=True)
    merged, deltas = await bench.round(0)
    against = {one.learner: one for one in merged.judged}
    assert not np.frombuffer(against["d"].factors, np.float32).any()
    assert against["d"].influence == 0 and against["a"].influence == pytest.approx(1 / 3)
    assert against["a"].factors == b"" and against["a"].agreement > 0 > against["d"].agreement
    again = Parameters(bench.plan, Outer(robust=True))
    again.begin()
    factors = [np.frombuffer(one.factors or np.ones(1, np.float32).tobytes(), np.float32) for one in merged.judged]
    assert again.stage(0, deltas, [1.0] * 4, factors) == merged.digest, "a replay makes the same of it"


async def test_without_robust_everything_is_merged_and_the_attacker_is_named_all_the_same() -> None:
    bench = Bench(robust=False)
    for number in range(12):
        merged, _ = await bench.round(number)
        assert all(one.factors == b"" and one.influence == 0.25 for one in merged.judged)
    assert {one.learner for one in merged.judged if one.suspect} == {"d"}


async def test_a_round_of_a_suspect_alone_comes_to_nothing() -> None:
    bench = Bench(robust=True)
    for number in range(12):
        await bench.round(number)
    key = ("d", 12, 1)
    bench.inbox.ask(key, 0)
    np.frombuffer(bench.inbox.receive(key), np.uint8)[:] = bench.deltas(0)[0].view(np.uint8)
    bench.inbox.arrived(key, "mark")
    bench.inbox.open(key, "mark")
    bench.merging.merge(fx.Merge(12, 0, (fx.Part("d", 1, 1.0),)))
    await asyncio.sleep(0)
    (failed,) = bench.told
    assert isinstance(failed, fx.Unmergeable) and not failed.reset and "leaves out every contribution" in failed.reason
