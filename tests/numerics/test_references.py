"""Whom a contribution is compared with, and that a large round is judged like a small one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.numerics.agreement import BUCKETS
from atoll.numerics.deltas import as_readable
from atoll.numerics.filter import Filter, measure_round
from atoll.numerics.fragments import make_plan
from atoll.numerics.merge import cut_fragment
from atoll.numerics.references import MOST, draw_references, find_others, median_of_counted
from atoll.protocol.messages import TensorSpec

PLAN = make_plan([TensorSpec("a", (64, 16), "float32"), TensorSpec("b", (32, 16), "float32")], 1)


@given(st.integers(1, MOST), st.integers(0, 10_000))
def test_up_to_the_most_everybody_is_a_reference(members: int, round: int) -> None:
    assert draw_references(members, round).tolist() == list(range(members))


@given(st.integers(MOST + 1, 700), st.integers(0, 10_000))
def test_beyond_it_as_many_are_drawn_each_once_and_the_same_by_everybody(members: int, round: int) -> None:
    drawn = draw_references(members, round).tolist()
    assert len(set(drawn)) == MOST and drawn == sorted(drawn) and drawn[0] >= 0 and drawn[-1] < members
    assert draw_references(members, round).tolist() == drawn


def test_every_member_is_drawn_about_equally_often() -> None:
    drawn = np.bincount(np.concatenate([draw_references(200, round) for round in range(2000)]), minlength=200)
    expected = 2000 * MOST / 200
    assert abs(drawn / expected - 1).max() < 0.2


@given(st.integers(2, 40), st.integers(0, 99))
def test_a_median_of_the_others_is_that_of_numpy(members: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    figures = dice.standard_normal((members, members, 3))
    found = median_of_counted(figures, find_others(members, draw_references(members, 0)))
    expected = np.stack([np.median(np.delete(figures[m], m, axis=0), axis=0) for m in range(members)])
    assert (found == expected).all(), "to the bit: verdicts of earlier versions stay"


def test_where_nobody_counts_there_is_no_median() -> None:
    counted = np.array([[True, True], [False, False]])
    found = median_of_counted(np.array([[1.0, 4.0], [2.0, 3.0]]), counted)
    assert found[0] == 2.5 and np.isnan(found[1])


@pytest.mark.parametrize("sample", [False, True])
def test_in_a_round_of_two_hundred_those_who_harm_are_named_and_nobody_else(sample: bool) -> None:
    dice, members, size = np.random.default_rng(3), 200, PLAN.fragments[0].size
    names = [f"learner-{number:03}" for number in range(members)]
    filter_ = Filter(PLAN)
    for round in range(10):
        common = 0.5 * dice.standard_normal(size)
        given_ = [(common + dice.standard_normal(size)).astype(np.float32) for _ in names]
        for number in range(20):
            given_[10 * number] *= -1
        given_[5] *= 6
        judged = filter_.judge(0, names, given_, round=round, sample=sample)
    suspects = {name for name, one in zip(names, judged, strict=True) if one.suspect}
    assert suspects == {names[10 * number] for number in range(20)} | {names[5]}


@pytest.mark.parametrize("members", [3, MOST, 160])
def test_what_a_shard_tells_of_a_contribution_is_bounded_however_many_there_are(members: int) -> None:
    """`NormsHere.squares`, where contributions are compared: for each cut a square, dot products and a sketch."""
    fragment, dice = PLAN.fragments[0], np.random.default_rng(0)
    given_ = [dice.standard_normal(fragment.size).astype(np.float32) for _ in range(members)]
    figures = measure_round(fragment, [as_readable(fragment, one) for one in given_], None, round=5)
    most = 8 * len(cut_fragment(fragment)) * (1 + MOST + BUCKETS)
    assert figures.nbytes <= members * most < members * 24 * 1024
