from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError
from atoll.protocol.pace import median
from atoll.protocol.settings import Settings
from atoll.protocol.weights import limited, telling

weights = st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=40)
limits = st.floats(1.0, 50.0)
CLOSE = 1 + 1e-9


def others(weights: list[float], place: int) -> float:
    return median(sorted(weights[:place] + weights[place + 1 :]))


@given(weights, limits)
def test_none_is_above_the_limit_times_the_median_of_the_others(weights: list[float], limit: float) -> None:
    merged = limited(weights, limit)
    if len(weights) > 2:
        most = max(range(len(weights)), key=lambda place: weights[place])
        assert merged[most] <= limit * others(weights, most) * CLOSE


@given(st.lists(st.floats(1.0, 2.0), min_size=3, max_size=40), st.floats(1e3, 1e30), st.floats(2.0, 50.0), st.data())
def test_fewer_than_half_cannot_pass_it_together(
    honest: list[float], claim: float, limit: float, data: st.DataObject
) -> None:
    liars = data.draw(st.integers(1, len(honest) - 1))
    merged = limited([*honest, *[claim] * liars], limit)
    assert merged[: len(honest)] == honest and max(merged) <= limit * 2.0 * CLOSE


@given(weights, limits)
def test_nothing_is_raised_and_the_order_stays(weights: list[float], limit: float) -> None:
    merged = limited(weights, limit)
    assert all(0 < now <= was for now, was in zip(merged, weights, strict=True))
    pairs = sorted(zip(weights, merged, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(pairs))


@given(weights, limits)
def test_what_keeps_to_the_limit_stays_to_the_bit(weights: list[float], limit: float) -> None:
    if len(weights) > 2 and max(weights) <= limit * median(sorted(weights)[:-1]):
        assert limited(weights, limit) == weights


@given(st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=2), limits)
def test_one_or_two_are_never_changed(weights: list[float], limit: float) -> None:
    assert limited(weights, limit) == weights


@pytest.mark.parametrize("fleet", [[1, 2, 4], [4, 2, 1, 1], [1, 1, 4], [1, 1, 1, 2, 2, 4, 4, 4], [1] * 9 + [4]])
def test_by_default_learners_of_up_to_four_times_the_tokens_are_not_touched(fleet: list[int]) -> None:
    """Of as many more steps; and, all sizes being there, of batches as much larger."""
    assert limited([100.0 * size for size in fleet], Settings().weight_limit) == [100.0 * size for size in fleet]
    assert limited([1.0, 4.0, 16.0], Settings().weight_limit) == [1.0, 4.0, 16.0]


@pytest.mark.parametrize("count", [3, 4, 8, 20])
def test_a_boast_is_cut_to_a_share(count: int) -> None:
    honest = [1.0] * (count - 1)
    merged = limited([*honest, 1e30], 8.0)
    assert merged == [*honest, 8.0]
    text = telling([f"l{n}" for n in range(count)], [*honest, 1e12], merged, 8.0)
    assert text == f"weight limited to 8 times the median of the others: l{count - 1} from 1e+12 to 8"
    assert telling(["a"], [1.0], [1.0], 8.0) == ""


@pytest.mark.parametrize("limit", [0.5, 0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_below_the_median_is_no_limit(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"weight_limit = .* is not a number of 1"):
        Settings(weight_limit=limit)
