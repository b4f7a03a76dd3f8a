"""Scores that become worse are seen, those that only go up and down are not."""

from __future__ import annotations

import pytest

from atoll.protocol import guard
from atoll.protocol.guard import Trend


def after(*losses: float | None, trend: Trend | None = None, first: int = 0) -> Trend:
    """Scores of rounds 0, 10, 20 and so on."""
    trend = trend or Trend()
    for number, loss in enumerate(losses, first):
        trend = guard.scored(trend, 10 * number, loss)
    return trend


FALLING = (4.2, 3.0, 2.4, 2.0, 1.8)


def test_a_loss_that_falls_and_goes_up_a_little_raises_no_alarm() -> None:
    trend = after(*FALLING, 1.85, 1.79, 1.9, 1.8)
    assert not trend.alarmed and trend.good == 80 and trend.best == 1.79


def test_three_bad_scores_in_a_row_raise_the_alarm_and_the_way_back_is_the_last_good_one() -> None:
    two = after(*FALLING, 9.0, 12.0)
    assert not two.alarmed and two.bad == 2
    three = after(15.0, trend=two, first=7)
    assert three.alarmed and guard.target(three, 71) == 40


def test_bad_scores_that_are_not_in_a_row_raise_none() -> None:
    assert not after(*FALLING, 9.0, 9.0, 1.8, 9.0, 9.0).alarmed


def test_a_score_that_is_not_finite_raises_the_alarm_at_once() -> None:
    assert after(*FALLING, None).alarmed and after(*FALLING, float("nan")).alarmed
    assert after(None).alarmed and guard.target(after(None), 5) is None, "there is nothing to go back to"


def test_the_limit_is_a_quarter_of_the_fall_so_far() -> None:
    assert after(4.2, 2.2).limit == pytest.approx(2.2 + 0.5)


def test_no_loss_is_let_past_twice_the_best_however_far_it_has_fallen() -> None:
    trend = after(5.0, 1.0, 0.3, 0.1)
    assert trend.limit == pytest.approx(0.2)
    assert after(0.21, 0.21, 0.21, trend=trend, first=4).alarmed


def test_a_run_that_has_only_begun_may_rise_a_little() -> None:
    assert not after(4.2, 4.3, 4.3, 4.3).alarmed
    assert after(4.2, 4.5, 4.6, 4.7).alarmed


def test_scores_that_go_up_and_down_by_much_set_a_wider_limit() -> None:
    noisy = (1.0, 0.1, 0.14, 0.1, 0.15, 0.09, 0.14, 0.1)
    trend = after(*noisy)
    assert trend.limit > 2 * trend.best and not after(0.2, 0.2, 0.2, trend=trend, first=9).alarmed


def test_losses_below_zero_are_judged_by_their_fall_too() -> None:
    assert not after(-1.0, -5.0, -4.5, -4.8, -4.6).alarmed
    assert after(-1.0, -5.0, -3.0, -3.0, -3.0).alarmed


def test_an_alarm_is_over_with_a_good_score_and_not_with_one_just_below_the_limit() -> None:
    trend = after(*FALLING, 9.0, 9.0, 9.0)
    assert after(trend.limit - 0.01, trend=trend, first=8).alarmed
    assert not after(1.9, trend=trend, first=8).alarmed


def test_the_limit_does_not_creep_up_with_a_loss_that_rises_slowly() -> None:
    slow = [1.8 + 0.02 * n for n in range(60)]
    assert after(*FALLING, *slow).alarmed


def test_after_a_rollback_scores_from_before_it_count_for_nothing() -> None:
    trend = guard.rolled_back(after(*FALLING, None), 40, at=75)
    assert not trend.alarmed and trend.good == 40
    assert not guard.counts(trend, 75, committed=90) and guard.counts(trend, 76, committed=90)


def test_a_run_is_not_rolled_back_twice_without_a_good_score_in_between() -> None:
    trend = guard.rolled_back(after(*FALLING, None), 40, at=55)
    worse = after(9.0, 9.0, 9.0, trend=trend, first=6)
    assert worse.alarmed and guard.target(worse, 90) is None
    better = after(1.7, None, trend=worse, first=9)
    assert guard.target(better, 110) == 90


def test_rounds_that_never_were_and_scores_that_come_too_late_count_for_nothing() -> None:
    trend = after(*FALLING)
    assert not guard.counts(trend, -1, 100) and not guard.counts(trend, 101, 100) and not guard.counts(trend, 39, 100)
    assert guard.counts(trend, 40, 100) and guard.counts(trend, 100, 100)


def test_there_is_no_way_back_to_the_round_that_the_run_is_at() -> None:
    assert guard.target(after(*FALLING, None), 40) is None and guard.target(after(*FALLING, None), 41) == 40
