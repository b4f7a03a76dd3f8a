from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError
from atoll.protocol.records import Share
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import median_of_sorted
from atoll.protocol.syncer.weights import describe_limited, limit_of, limit_weights, weight

weights = st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=40)
limits = st.floats(1.0, 50.0)
CLOSE = 1 + 1e-9


def alike(weights: list[float], limit: float) -> list[float]:
    """All within the same limit."""
    return limit_weights(weights, [limit] * len(weights))


def others(weights: list[float], place: int) -> float:
    return median_of_sorted(sorted(weights[:place] + weights[place + 1 :]))


def test_a_weight_is_quantity_times_quality() -> None:
    assert weight(Share("a", 1, 10, steps=10, tokens=1000, weight=0.0, base=0)) == 100_000.0
    assert weight(Share("a", 1, 10, steps=5, tokens=0, weight=0.0, base=0)) == 0.0


@given(weights, limits)
def test_none_is_above_the_limit_times_the_median_of_the_others(weights: list[float], limit: float) -> None:
    merged = alike(weights, limit)
    if len(weights) > 2:
        most = max(range(len(weights)), key=lambda place: weights[place])
        assert merged[most] <= limit * others(weights, most) * CLOSE


@given(st.lists(st.floats(1.0, 2.0), min_size=3, max_size=40), st.floats(1e3, 1e30), st.floats(2.0, 50.0), st.data())
def test_fewer_than_half_cannot_pass_it_together(
    honest: list[float], claim: float, limit: float, data: st.DataObject
) -> None:
    liars = data.draw(st.integers(1, len(honest) - 1))
    merged = alike([*honest, *[claim] * liars], limit)
    assert merged[: len(honest)] == honest and max(merged) <= limit * 2.0 * CLOSE


@given(weights, limits)
def test_nothing_is_raised_and_the_order_stays(weights: list[float], limit: float) -> None:
    merged = alike(weights, limit)
    assert all(0 < now <= was for now, was in zip(merged, weights, strict=True))
    pairs = sorted(zip(weights, merged, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(pairs))


@given(weights, limits)
def test_what_keeps_to_the_limit_stays_to_the_bit(weights: list[float], limit: float) -> None:
    half = max(weights) <= sum(sorted(weights)[:-1])
    if len(weights) > 2 and half and max(weights) <= limit * median_of_sorted(sorted(weights)[:-1]):
        assert alike(weights, limit) == weights


@given(st.lists(st.floats(1e-6, 1e18), min_size=1, max_size=2), limits)
def test_one_or_two_are_never_changed(weights: list[float], limit: float) -> None:
    assert alike(weights, limit) == weights


@pytest.mark.parametrize("fleet", [[1, 2, 2], [2, 2, 1, 1], [1, 1, 2], [1, 1, 1, 2, 2, 2, 2, 2], [1] * 9 + [2]])
def test_by_default_learners_of_up_to_twice_the_tokens_are_not_touched(fleet: list[int]) -> None:
    assert alike([100.0 * size for size in fleet], Settings().weight_limit) == [100.0 * size for size in fleet]


@given(weights, st.lists(st.floats(1.0, 1e6), min_size=40, max_size=40))
def test_nobody_has_more_than_half_of_three_or_more_whatever_is_allowed(
    weights: list[float], limits: list[float]
) -> None:
    merged = limit_weights(weights, limits[: len(weights)])
    if len(weights) > 2:
        assert max(merged) <= sum(merged) / 2 * CLOSE


@pytest.mark.parametrize("count", [3, 4, 8, 20])
def test_a_boast_is_cut_to_a_share(count: int) -> None:
    honest = [1.0] * (count - 1)
    merged = alike([*honest, 1e30], 2.0)
    assert merged == [*honest, 2.0]
    text = describe_limited([f"l{n}" for n in range(count)], [*honest, 1e12], merged)
    assert text == f"weight limited by the median of the others: l{count - 1} from 1e+12 to 2"
    assert describe_limited(["a"], [1.0], [1.0]) == ""


def test_a_learner_counts_like_the_others_until_enough_of_it_was_seen() -> None:
    settings = Settings(weight_limits={"large": 6.0})
    assert [limit_of("a", seen, settings) for seen in (0, 31, 32, 1000)] == [1.0, 1.0, 2.0, 2.0]
    assert [limit_of("large", seen, settings) for seen in (0, 1000)] == [6.0, 6.0]
    assert limit_weights([1.0, 1.0, 1.0, 1.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0])[-1] == 1.0
    assert limit_weights([1.0, 1.0, 1.0, 1.0, 5.0], [1.0, 1.0, 1.0, 1.0, 6.0])[-1] == 4.0, "half is the most"


@pytest.mark.parametrize("limit", [0.5, 0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_below_the_median_is_no_limit(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"weight_limit = .* is not a number of 1"):
        Settings(weight_limit=limit)
    with pytest.raises(ConfigError, match=r"weight_limit = .* is not a number of 1"):
        Settings(weight_limits={"a": limit})
