"""merge(cΔ) = c · merge(Δ), bit for bit, for c a power of two: no rule has a size of its own.

Contributions of every size from 10⁻⁶ to 10⁶ times a usual one are merged by every rule: directly, with factors of the
filter, and from sums of groups. Some rows almost cancel, so that their directions lie on both sides of the threshold
below which the mean is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atoll.choices import MERGE
from atoll.numerics.arrays import FloatArray
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.group_sums import GroupTerm, mean_rows, merge_groups, place_means, sum_group, why_not_summed
from atoll.numerics.kernels import CANCELLED
from atoll.numerics.merge import merge
from atoll.protocol.messages import TensorSpec

USUAL = 1e-3
"""Values of a usual contribution."""
POWERS = tuple(range(-20, 21, 4))
"""2⁻²⁰ to 2²⁰ are more than twelve orders of magnitude."""
ROWS, WIDTH = 8, 48
ANGLES = CANCELLED * np.geomspace(0.1, 40, ROWS)
"""Per row, between one contribution and the reverse of another: about twice the length of their mean direction."""
WEIGHTS = [1.0, 2.5, 0.5, 1.75]
FACTORS = [np.array(row, np.float32) for row in ([1, 0.5, 1], [1, 1, 0.25], [0, 1, 1], [0.75, 1, 1])]


def make_fragment(tensor: TensorSpec) -> Fragment:
    extra = TensorSpec("y.vector", (33,), "float32"), TensorSpec("z.embedding", (5, 16), "float32", embedding=True)
    return make_plan([tensor, *extra], 1).fragments[0]


MATRIX = make_fragment(TensorSpec("a", (ROWS, WIDTH), "float32"))


def draw_unrelated(count: int = len(WEIGHTS)) -> list[FloatArray]:
    dice = np.random.default_rng(3)
    return [(USUAL * dice.standard_normal(MATRIX.size)).astype(np.float32) for _ in range(count)]


def draw_cancelling(angles: np.ndarray = ANGLES) -> list[FloatArray]:
    """Two pairs: each row of the matrix in one contribution is almost the reverse of that in the next."""
    deltas = draw_unrelated()
    dice = np.random.default_rng(4)
    for first, second in ((0, 1), (2, 3)):
        rows = deltas[first][: ROWS * WIDTH].reshape(ROWS, WIDTH).astype(np.float64)
        aside = dice.standard_normal(rows.shape)
        aside -= rows * (np.sum(aside * rows, axis=1) / np.sum(rows * rows, axis=1))[:, np.newaxis]
        length = np.linalg.norm(rows, axis=1) / np.linalg.norm(aside, axis=1)
        deltas[second][: ROWS * WIDTH] = (-rows + aside * (angles * length)[:, np.newaxis]).astype(np.float32).ravel()
    return deltas


EVEN = [1.0, 1.0, 0.0, 0.0]
"""Weights under which the first two contributions of `draw_cancelling` cancel."""


def merge_plain(rule: str, deltas: list[FloatArray], weights: list[float]) -> FloatArray:
    out = np.full(MATRIX.size, np.nan, np.float32)
    merge(MATRIX, deltas, weights, out, rule)
    return out


def merge_filtered(rule: str, deltas: list[FloatArray], weights: list[float]) -> FloatArray:
    out = np.full(MATRIX.size, np.nan, np.float32)
    merge(MATRIX, deltas, weights, out, rule, FACTORS)
    return out


def merge_from_sums(rule: str, deltas: list[FloatArray], weights: list[float]) -> FloatArray:
    """A relay sums the first and the third, the others come by themselves."""
    group, alone = (0, 2), (1, 3)
    total, out = np.empty(MATRIX.size, np.float32), np.empty(MATRIX.size, np.float32)
    some, own = [deltas[at] for at in group], [weights[at] for at in group]
    radii = sum_group(rule, MATRIX, some, own, total)
    terms = [GroupTerm(total, sum(own), radii), *(GroupTerm(deltas[at], weights[at]) for at in alone)]
    rows = merge_groups(rule, MATRIX, terms, out)
    place_means(rule, MATRIX, rows, terms, [mean_rows(rule, MATRIX, rows, some, own), None, None], out)
    return out


Merge = Callable[[str, list[FloatArray], list[float]], FloatArray]
SUMMED = [
    rule
    for rule in MERGE.names()
    if not why_not_summed(rule, make_plan([MATRIX.pieces[0].tensor], 1), robust=False, moments=False)
]


@pytest.mark.parametrize(
    ("by", "rule"),
    [
        *((by, rule) for by in (merge_plain, merge_filtered) for rule in MERGE.names()),
        *((merge_from_sums, rule) for rule in SUMMED),
    ],
)
def test_contributions_of_any_size_are_merged_alike(by: Merge, rule: str) -> None:
    for deltas, weights in (
        (draw_unrelated(), WEIGHTS),
        (draw_cancelling(), WEIGHTS),
        (draw_cancelling(), EVEN),
        (draw_cancelling(np.full(ROWS, 0.5 * CANCELLED)), EVEN),
        (draw_cancelling(np.full(ROWS, 8 * CANCELLED)), EVEN),
    ):
        usual = by(rule, deltas, weights)
        for power in POWERS:
            factor = np.float32(2.0**power)
            found = by(rule, [factor * delta for delta in deltas], weights)
            assert found.tobytes() == (factor * usual).tobytes(), f"times 2^{power}"


@pytest.mark.parametrize("rule", ["rda", "rda-row"])
def test_the_cases_lie_on_both_sides_of_the_threshold(rule: str) -> None:
    """Where directions cancel, the result is about as long as what is left of them; otherwise as one contribution."""
    cancelled, kept = (
        float(np.linalg.norm(merge_plain(rule, draw_cancelling(np.full(ROWS, angle)), EVEN)[: ROWS * WIDTH]))
        for angle in (0.5 * CANCELLED, 8 * CANCELLED)
    )
    one = float(np.linalg.norm(draw_unrelated()[0][: ROWS * WIDTH]))
    assert cancelled < 1e-3 * one and kept > 0.9 * one


@pytest.mark.parametrize("sample", [False, True])
def test_the_filter_judges_contributions_of_any_size_alike(sample: bool) -> None:
    """One of them is loud and one points against the others."""
    common = draw_unrelated(7)
    deltas = [common[0] + np.float32(0.5) * one for one in common[1:]]
    deltas[4], deltas[5] = np.float32(40) * deltas[4], -deltas[5]
    plan, names = make_plan([piece.tensor for piece in MATRIX.pieces], 1), [f"learner-{n}" for n in range(6)]

    def judge(power: int) -> list[tuple[bytes, float, str]]:
        """Two rounds, so that what is known of a learner is used."""
        judged, found = Filter(plan), []
        for number in range(2):
            scaled = [np.float32(2.0**power) * one for one in deltas]
            verdicts = judged.judge(0, names, scaled, round=number, sample=sample)
            found += [(one.factors.tobytes(), one.agreement, one.suspect) for one in verdicts]
        return found

    usual = judge(0)
    assert len({factors for factors, _, _ in usual}) > 1, "some are shortened or left out"
    assert all(judge(power) == usual for power in POWERS)
