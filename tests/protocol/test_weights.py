from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings
from atoll.protocol.weights import limited, telling

weights = st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=40)
limits = st.floats(1.0, 50.0)
CLOSE = 1 + 1e-9


@given(weights, limits)
def test_none_is_above_the_limit_times_the_mean_that_is_merged(weights: list[float], limit: float) -> None:
    merged = limited(weights, limit)
    if len(weights) > 2:
        assert max(merged) <= limit * sum(merged) / len(merged) * CLOSE


@given(weights, limits)
def test_nothing_is_raised_and_the_order_stays(weights: list[float], limit: float) -> None:
    merged = limited(weights, limit)
    assert all(0 < now <= was for now, was in zip(merged, weights, strict=True))
    pairs = sorted(zip(weights, merged, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(pairs))


@given(weights, limits)
def test_what_keeps_to_the_limit_stays_to_the_bit(weights: list[float], limit: float) -> None:
    if max(weights) <= limit * sum(weights) / len(weights):
        assert limited(weights, limit) == weights


@given(st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=2), limits)
def test_one_or_two_are_never_changed(weights: list[float], limit: float) -> None:
    assert limited(weights, limit) == weights


@given(st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=8))
def test_by_default_a_round_of_up_to_eight_is_never_changed(weights: list[float]) -> None:
    """All of a round is n times its mean: nobody has more than that."""
    assert limited(weights, Settings().weight_limit) == weights


def test_a_boast_among_many_is_cut_to_a_share() -> None:
    merged = limited([1.0] * 19 + [1e12], 8.0)
    assert merged[:19] == [1.0] * 19
    assert merged[19] == pytest.approx(8 / 20 * sum(merged))
    text = telling([f"l{n}" for n in range(20)], [1.0] * 19 + [1e12], merged, 8.0)
    assert text == "weight limited to 8 times the mean: l19 from 1e+12 to 12.67"
    assert telling(["a"], [1.0], [1.0], 8.0) == ""


@pytest.mark.parametrize("limit", [0.5, 0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_below_the_mean_is_no_limit(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"weight_limit = .* is not a number of 1"):
        Settings(weight_limit=limit)
