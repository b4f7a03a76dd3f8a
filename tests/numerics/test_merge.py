"""Merge rules against numbers made by hand, float64 references and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.choices import MERGE
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.merge import merge
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec

MATRIX = TensorSpec("a.matrix", (6, 50), "float32")
VECTOR = TensorSpec("b.vector", (37,), "float32")
EMBEDDING = TensorSpec("c.embedding", (10, 8), "float32", embedding=True)
FRAGMENT = make_plan([MATRIX, VECTOR, EMBEDDING], 1).fragments[0]
PARTS = [slice(0, 300), slice(300, 337), slice(337, 417)]

contributions = st.tuples(st.integers(2, 19), st.integers(0, 10_000), st.floats(-4, 4))


def flat(*values: float) -> tuple[Fragment, FloatArray]:
    return make_plan([TensorSpec("t", (len(values),), "float32")], 1).fragments[0], np.array(values, np.float32)


def draw(count: int, seed: int, spread: float = 0.0) -> tuple[list[FloatArray], list[float]]:
    """Deltas whose scales lie up to 10^spread apart, and weights."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(0, abs(spread), count)
    deltas = [(scale * rng.standard_normal(FRAGMENT.size)).astype(np.float32) for scale in scales]
    return deltas, list(rng.uniform(0.1, 5.0, count))


def merged(deltas: list[FloatArray], weights: list[float], rule: str, fragment: Fragment = FRAGMENT) -> FloatArray:
    out = np.full(fragment.size, np.nan, np.float32)
    merge(fragment, deltas, weights, out, rule)
    return out


def mean64(deltas: list[FloatArray], weights: list[float]) -> DoubleArray:
    return np.average(np.array(deltas, np.float64), axis=0, weights=weights)


def rda64(deltas: list[FloatArray], weights: list[float]) -> DoubleArray:
    """The equation of the protocol page, on one tensor or row."""
    stack, w = np.array(deltas, np.float64), np.array(weights)
    norms = np.linalg.norm(stack, axis=1)
    directions = stack / np.where(norms == 0, 1, norms)[:, np.newaxis]
    direction = np.average(directions, axis=0, weights=w)
    radius: float = np.average(norms, weights=w)
    return radius * direction / np.linalg.norm(direction)


def norm(values: FloatArray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def test_mean_by_hand() -> None:
    fragment, a = flat(1, 2, -4)
    assert merged([a, np.array([5, -2, 0], np.float32)], [3, 1], "mean", fragment).tolist() == [2, 1, -3]


def test_rda_by_hand() -> None:
    """Norms 3 and 4 at right angles, equal weights: norm 3.5 along the diagonal."""
    fragment, a = flat(3, 0)
    out = merged([a, np.array([0, 4], np.float32)], [1, 1], "rda", fragment)
    assert out == pytest.approx([3.5 / 2**0.5] * 2, rel=1e-6)


def test_rda_by_hand_with_weights() -> None:
    """w = 3, 1: radius (3·3 + 1·4) / 4 = 3.25, direction (3, 1) / √10."""
    fragment, a = flat(3, 0)
    out = merged([a, np.array([0, 4], np.float32)], [3, 1], "rda", fragment)
    assert out == pytest.approx([3.25 * 3 / 10**0.5, 3.25 / 10**0.5], rel=1e-6)


def test_mean_is_the_sum_in_the_order_given_bit_for_bit() -> None:
    deltas, weights = draw(11, 3)
    relative = np.array([weight / max(weights) for weight in weights])
    shares = (relative / math.fsum(relative)).astype(np.float32)
    expected = shares[0] * deltas[0]
    for share, delta in zip(shares[1:], deltas[1:], strict=True):
        expected = expected + share * delta
    assert merged(deltas, weights, "mean").tobytes() == expected.tobytes()


def test_mean_with_exact_shares_is_numpys_sum_bit_for_bit() -> None:
    deltas, _ = draw(8, 4)
    expected = np.float32(0.125) * deltas[0]
    for delta in deltas[1:]:
        expected = expected + np.float32(0.125) * delta
    assert merged(deltas, [2.0] * 8, "mean").tobytes() == expected.tobytes()


@given(contributions)
@settings(max_examples=40, deadline=None)
def test_mean_agrees_with_float64(case: tuple[int, int, float]) -> None:
    deltas, weights = draw(*case)
    scale = max(float(np.abs(delta).max()) for delta in deltas)
    np.testing.assert_allclose(merged(deltas, weights, "mean"), mean64(deltas, weights), atol=2e-6 * scale, rtol=0)


@given(contributions)
@settings(max_examples=40, deadline=None)
def test_rda_agrees_with_float64(case: tuple[int, int, float]) -> None:
    deltas, weights = draw(*case)
    out = merged(deltas, weights, "rda")
    for part in PARTS[:2]:
        expected = rda64([delta[part] for delta in deltas], weights)
        np.testing.assert_allclose(out[part], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@given(contributions)
@settings(max_examples=30, deadline=None)
def test_rda_keeps_the_mean_norm_of_every_tensor(case: tuple[int, int, float]) -> None:
    deltas, weights = draw(*case)
    out = merged(deltas, weights, "rda")
    for part in PARTS[:2]:
        radius = np.average([norm(delta[part]) for delta in deltas], weights=weights)
        assert norm(out[part]) == pytest.approx(radius, rel=1e-6)


@given(contributions)
@settings(max_examples=30, deadline=None)
def test_rda_row_is_rda_of_every_row_and_of_whole_vectors(case: tuple[int, int, float]) -> None:
    deltas, weights = draw(*case)
    out = merged(deltas, weights, "rda-row")
    for part in [*(slice(50 * row, 50 * row + 50) for row in range(6)), PARTS[1]]:
        expected = rda64([delta[part] for delta in deltas], weights)
        np.testing.assert_allclose(out[part], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("rule", ["rda", "rda-row"])
def test_embeddings_use_the_mean(rule: str) -> None:
    deltas, weights = draw(5, 1)
    assert merged(deltas, weights, rule)[PARTS[2]].tobytes() == merged(deltas, weights, "mean")[PARTS[2]].tobytes()


@given(contributions)
@settings(max_examples=30, deadline=None)
def test_one_rule_takes_rda_of_the_rows_of_embeddings_too(case: tuple[int, int, float]) -> None:
    deltas, weights = draw(*case)
    out, usual = merged(deltas, weights, "rda-row-embeddings"), merged(deltas, weights, "rda-row")
    assert out[: PARTS[2].start].tobytes() == usual[: PARTS[2].start].tobytes()
    for row in (slice(PARTS[2].start + 8 * n, PARTS[2].start + 8 * n + 8) for n in range(10)):
        expected = rda64([delta[row] for delta in deltas], weights)
        np.testing.assert_allclose(out[row], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_an_embedding_row_that_one_learner_met_is_its_share_of_it() -> None:
    """The others give 0 there, which has no direction: the mean norm is that share too."""
    deltas = [np.zeros(FRAGMENT.size, np.float32) for _ in range(4)]
    deltas[1][PARTS[2]] = np.arange(80)
    np.testing.assert_allclose(merged(deltas, [1.0] * 4, "rda-row-embeddings")[PARTS[2]], np.arange(80) / 4, rtol=1e-6)


@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from(MERGE.names()))
@settings(max_examples=30, deadline=None)
def test_equal_deltas_come_out_as_they_are(count: int, seed: int, rule: str) -> None:
    (delta,), _ = draw(1, seed)
    _, weights = draw(count, seed + 1)
    np.testing.assert_allclose(merged([delta] * count, weights, rule), delta, rtol=2e-6, atol=1e-9)


@given(st.integers(2, 10), st.integers(0, 1000), st.integers(-20, 20), st.sampled_from(MERGE.names()))
@settings(max_examples=30, deadline=None)
def test_scaling_all_deltas_by_a_power_of_two_scales_the_result_exactly(
    count: int, seed: int, power: int, rule: str
) -> None:
    deltas, weights = draw(count, seed)
    factor = np.float32(2.0**power)
    scaled = merged([factor * delta for delta in deltas], weights, rule)
    np.testing.assert_array_equal(scaled, factor * merged(deltas, weights, rule))


@given(st.integers(2, 10), st.integers(0, 1000), st.sampled_from(MERGE.names()))
@settings(max_examples=20, deadline=None)
def test_only_the_ratio_of_weights_counts(count: int, seed: int, rule: str) -> None:
    deltas, weights = draw(count, seed)
    huge = merged(deltas, [weight * 2.0**900 for weight in weights], rule)
    np.testing.assert_array_equal(huge, merged(deltas, weights, rule))


@pytest.mark.parametrize("rule", MERGE.names())
def test_a_single_contribution_is_itself_bit_for_bit(rule: str) -> None:
    (delta,), _ = draw(1, 5)
    delta[:5] = [0.0, -0.0, 1e-45, 3.4e38, -1e-40]
    assert merged([delta], [0.3], rule).tobytes() == delta.tobytes()


@pytest.mark.parametrize("rule", MERGE.names())
def test_weight_zero_is_as_if_not_there(rule: str) -> None:
    (a, b, c), _ = draw(3, 6)
    broken = np.full_like(a, np.inf)
    assert merged([broken, a, b, c], [0, 1, 2, 3], rule).tobytes() == merged([a, b, c], [1, 2, 3], rule).tobytes()
    assert merged([broken, a], [0, 7], rule).tobytes() == a.tobytes()


def test_directions_that_cancel_fall_back_to_the_mean() -> None:
    fragment, a = flat(3, 4, 0)
    out = merged([a, -2 * a], [1, 1], "rda", fragment)
    assert out.tolist() == [-1.5, -2, 0]


def test_only_the_rows_that_cancel_fall_back() -> None:
    fragment = make_plan([TensorSpec("t", (2, 2), "float32")], 1).fragments[0]
    a, b = np.array([1, 1, 3, 0], np.float32), np.array([-3, -3, 0, 4], np.float32)
    out = merged([a, b], [1, 1], "rda-row", fragment)
    assert out == pytest.approx([-1, -1, 3.5 / 2**0.5, 3.5 / 2**0.5], rel=1e-6)


@pytest.mark.parametrize("rule", MERGE.names())
def test_zeros_merge_to_zeros(rule: str) -> None:
    zero = np.zeros(FRAGMENT.size, np.float32)
    assert not merged([zero, zero, zero], [1, 2, 3], rule).any()


def test_a_zero_contribution_has_no_direction_but_counts_in_the_radius() -> None:
    fragment, a = flat(6, 8)
    assert merged([a, 0 * a], [1, 1], "rda", fragment) == pytest.approx([3, 4], rel=1e-6)


def test_subnormal_and_huge_contributions_stay_finite() -> None:
    fragment, _ = flat(0, 0)
    tiny, one = np.array([1e-40, 0], np.float32), np.array([0, 2], np.float32)
    huge = np.array([0, 3e38], np.float32)
    assert merged([tiny, one], [1, 1], "rda", fragment) == pytest.approx([0, 1], rel=1e-6)
    assert merged([tiny, tiny], [1, 1], "rda", fragment) == pytest.approx(tiny, rel=1e-4)
    assert merged([huge, huge], [1, 2], "rda", fragment) == pytest.approx(huge, rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "text"),
    [([0.0, 0.0], "sum to 0"), ([-1.0, 2.0], "not negative"), ([float("nan"), 1.0], "finite"), ([1.0], "zip")],
)
def test_weights_that_cannot_be_are_refused(weights: list[float], text: str) -> None:
    deltas, _ = draw(2, 0)
    with pytest.raises(ValueError, match=text):
        merged(deltas, weights, "mean")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of mean, "):
        merged(*draw(2, 0), "nonsense")


def test_inputs_are_left_alone() -> None:
    deltas, weights = draw(9, 8)
    before = [delta.tobytes() for delta in deltas]
    for rule in MERGE.names():
        merged(deltas, weights, rule)
    assert [delta.tobytes() for delta in deltas] == before


@pytest.mark.parametrize("rule", MERGE.names())
def test_what_is_left_out_of_a_tensor_is_as_if_it_were_not_there(rule: str) -> None:
    deltas, weights = draw(4, seed=7)
    factors = [np.ones(3, np.float32) for _ in deltas]
    factors[2][1] = 0.0
    out = np.full(FRAGMENT.size, np.nan, np.float32)
    merge(FRAGMENT, deltas, weights, out, rule, factors)
    without = merged([one for n, one in enumerate(deltas) if n != 2], [weights[n] for n in (0, 1, 3)], rule)
    whole = merged(deltas, weights, rule)
    for part, expected in zip(PARTS, (whole, without, whole), strict=True):
        assert out[part].tobytes() == expected[part].tobytes()


@pytest.mark.parametrize("rule", MERGE.names())
def test_a_factor_below_one_shortens_and_factors_of_one_change_no_bit(rule: str) -> None:
    deltas, weights = draw(3, seed=8)
    ones = [np.ones(3, np.float32) for _ in deltas]
    out = np.empty(FRAGMENT.size, np.float32)
    merge(FRAGMENT, deltas, weights, out, rule, ones)
    assert out.tobytes() == merged(deltas, weights, rule).tobytes()
    ones[0] = np.full(3, 0.25, np.float32)
    merge(FRAGMENT, deltas, weights, out, rule, ones)
    assert out.tobytes() == merged([np.float32(0.25) * deltas[0], *deltas[1:]], weights, rule).tobytes()


def test_a_tensor_that_nobody_gives_does_not_move() -> None:
    deltas, weights = draw(2, seed=9)
    out, factor = np.empty(FRAGMENT.size, np.float32), np.array([1, 0, 1], np.float32)
    merge(FRAGMENT, deltas, weights, out, "rda", [factor, factor])
    assert not out[PARTS[1]].any() and out[PARTS[0]].any()


@given(contributions, st.integers(2, 6))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("rule", ["mean", "rda-row"])
def test_splits_along_rows_change_no_bit(rule: str, drawn: tuple[int, int, float], count: int) -> None:
    whole = make_plan([MATRIX], 1).fragments[0]
    deltas, weights = draw(*drawn)
    deltas = [delta[: whole.size] for delta in deltas]
    expected = merged(deltas, weights, rule, whole)
    for part in make_plan([MATRIX], count).fragments:
        [piece] = part.pieces
        rows = slice(50 * piece.first, 50 * (piece.first + piece.rows))
        assert np.array_equal(merged([delta[rows] for delta in deltas], weights, rule, part), expected[rows])


def test_rda_measures_every_piece_of_a_split_tensor_by_itself() -> None:
    first, second = make_plan([TensorSpec("t", (2, 2), "float32")], 2).fragments
    a, b = np.array([3, 0], np.float32), np.array([0, 4], np.float32)
    assert merged([a, b], [1, 1], "rda", first) == pytest.approx([3.5 / 2**0.5] * 2, rel=1e-6)
    assert merged([10 * a, 10 * b], [1, 1], "rda", second) == pytest.approx([35 / 2**0.5] * 2, rel=1e-6)
