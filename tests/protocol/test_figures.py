"""The figures that people read: each has one definition."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.statistics import RecentSamples, Spread, after_adoption, merged_share, participation, spread


def test_what_is_in_flight_counts_for_nothing_yet() -> None:
    assert merged_share(60, 100) == 0.6
    assert merged_share(60, 100, in_flight=40) == 1.0
    assert merged_share(0, 100, in_flight=100) is None and merged_share(0, 0) is None


def test_a_member_was_alive_whatever_was_believed() -> None:
    assert participation(3, 4) == 0.75
    assert participation(4, 3) == 1.0 and participation(0, 0) == 0.0


@pytest.mark.parametrize(
    ("tokens", "held", "kept", "before", "after"),
    [
        (100, 80, 0, (5, 2), (25, 2)),  # overlap: 20 were made after the copy that is in the version
        (100, 0, 0, (5, 2), (105, 102)),  # it missed the round
        (100, 80, 20, (5, 2), (5, 2)),  # carried
        (100, 0, 100, (5, 2), (5, 2)),  # carried over a version that holds none of its steps
        (10, 80, 0, (90, 90), (20, 20)),  # it had counted them as missed, and they are in the version after all
        (0, 0, 0, (0, 0), (0, 0)),
    ],
)
def test_an_adoption_drops_by_overlap_or_because_a_round_was_missed(
    tokens: int, held: int, kept: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    assert after_adoption(tokens, held, kept, *before) == after


def test_the_spread_of_a_few() -> None:
    assert spread([]) == Spread(None, None, None)
    assert spread([24]) == Spread(24.0, 24.0, 24.0)
    assert spread([*[24] * 18, 48, 96]) == Spread(24.0, 28.8, 48.0), "one of twenty is above the 95th percentile"


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 20))
def test_recent_samples_have_the_spread_of_the_last_ones(samples: list[int], most: int) -> None:
    recent = RecentSamples(most)
    for sample in samples:
        recent.add(sample)
    last = samples[-most:]
    assert recent.spread == spread(last)
    assert recent.spread.median == median(last)
    assert recent.spread.p95 is not None
    assert sum(one <= recent.spread.p95 for one in last) >= 0.95 * len(last)
