"""What became of the time, counted on lives made by hand."""

from __future__ import annotations

import pytest

from atoll.estimate.chips import TimeSpan
from atoll.estimate.goodput import count


def test_a_step_with_fewer_slices_counts_less() -> None:
    tally = count([[TimeSpan(0, 60, "stepping", 1.0, 1.0), TimeSpan(60, 100, "stepping", 0.5, 0.5)]], 100.0, 10.0)
    assert tally.goodput == pytest.approx(0.8) and tally.uptime == 1.0 and tally.learner_steps == pytest.approx(8.0)
    assert tally.lost == {"missing slices": pytest.approx(0.2)}


def test_up_is_whenever_at_least_one_steps() -> None:
    first = [TimeSpan(0, 40, "stepping", 1.0, 1.0), TimeSpan(40, 100, "gone")]
    second = [TimeSpan(0, 30, "recovering"), TimeSpan(30, 70, "stepping", 1.0, 1.0), TimeSpan(70, 100, "scaling down")]
    tally = count([first, second], 100.0, 10.0)
    assert tally.uptime == pytest.approx(0.7) and tally.goodput == pytest.approx(0.4)
    assert tally.liveness == pytest.approx((40 + 70) / 200)


def test_goodput_and_losses_make_all_of_the_time() -> None:
    life = [
        TimeSpan(0, 10, "stepping", 0.9, 0.7),
        TimeSpan(10, 15, "waiting"),
        TimeSpan(15, 21, "scaling up"),
        TimeSpan(21, 40, "outage"),
    ]
    tally = count([life], 40.0, 10.0)
    assert tally.goodput + sum(tally.lost.values()) == pytest.approx(1.0)
    assert tally.lost["idle in steps"] == pytest.approx(10 * 0.2 / 40)


def test_hours_away_are_not_allocated_and_the_end_is_the_end() -> None:
    life = [TimeSpan(0, 50, "away"), TimeSpan(50, 120, "stepping", 1.0, 1.0)]
    tally = count([life], 100.0, 10.0)
    assert tally.goodput == 1.0 and tally.uptime == pytest.approx(0.5) and tally.learner_steps == pytest.approx(5.0)
