"""Figures of cuts: what they say of whole tensors, and that it does not matter who measures which part."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.numerics import merge
from atoll.numerics.agreement import BUCKETS
from atoll.numerics.comparison import compare_cuts, measure_cuts
from atoll.numerics.deltas import as_readable
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import make_plan
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol.messages import TensorSpec

PLAN = make_plan([TensorSpec("rows", (40, 30), "float32"), TensorSpec("line", (70,), "float32")], 1)
(FRAGMENT,) = PLAN.fragments
NAMES = ["a", "b", "c", "d"]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "PART", 100)


def draw(seed: int, count: int = 4) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.normal(size=FRAGMENT.size).astype(np.float32) for _ in range(count)]


def test_norms_and_cosines_are_those_of_whole_tensors() -> None:
    deltas, momentum = draw(0), draw(1)[0]
    figures = measure_cuts(FRAGMENT, [as_readable(FRAGMENT, one) for one in deltas], momentum)
    assert len(figures) > 10
    found = compare_cuts(FRAGMENT, 4, figures, with_momentum=True)
    for number, (_, at) in enumerate(FRAGMENT.parts):
        values = [one[at].astype(np.float64) for one in [*deltas, momentum]]
        norms = [np.linalg.norm(one) for one in values]
        assert found.norms[:, number] == pytest.approx(norms)
        for i in range(5):
            expected = [values[i] @ values[j] / norms[i] / norms[j] for j in range(5)]
            assert found.cosines[i, :, number] == pytest.approx(expected)


def test_sketches_of_one_direction_agree_and_of_others_do_not() -> None:
    """Each cut has signs of its own: the same values in another cut are another direction."""
    one = draw(2, 1)[0]
    moved = np.roll(one, 300)
    figures = measure_cuts(FRAGMENT, [as_readable(FRAGMENT, values) for values in (one, 2 * one, -one, moved)])
    same, longer, against, other = compare_cuts(FRAGMENT, 4, figures).sketches
    assert same @ longer == pytest.approx(1) and same @ against == pytest.approx(-1)
    assert abs(same @ other) < 6 / np.sqrt(BUCKETS)


def test_what_is_zero_agrees_with_nothing() -> None:
    given = [as_readable(FRAGMENT, one) for one in (np.zeros(FRAGMENT.size, np.float32), draw(3, 1)[0])]
    norms, cosines, sketches = compare_cuts(FRAGMENT, 2, measure_cuts(FRAGMENT, given))
    assert not norms[0].any() and not cosines[0, 1].any() and not sketches[0].any()


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_all_shards_have_the_figures_of_the_whole(shards: int, threads: int) -> None:
    deltas, plan = draw(4), make_shard_plan(PLAN, shards)
    told = [
        measure_cuts(
            part, [as_readable(part, np.ascontiguousarray(one[at])) for one in deltas], None, threads, at.start
        )
        for _, part, at in plan.places(0)
    ]
    whole = measure_cuts(FRAGMENT, [as_readable(FRAGMENT, one) for one in deltas])
    assert np.concatenate(told).tobytes() == whole.tobytes()
    by_parts, alone = Filter(PLAN), Filter(PLAN)
    for mine, theirs in zip(
        by_parts.judge_cuts(0, NAMES, np.concatenate(told)), alone.judge(0, NAMES, deltas), strict=True
    ):
        assert mine.factors.tobytes() == theirs.factors.tobytes() and mine.agreement == theirs.agreement
