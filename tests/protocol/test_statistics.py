from __future__ import annotations

import pytest

from atoll.protocol.statistics import LearnerTime, format_score, format_scores_apart, round_score


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, "–"), (0.0, "0.00"), (2.254, "2.25"), (1.0, "1.00"), (0.0713, "0.0713"), (123_456.0, "1.23e+05")],
        *[(0.00042134, "0.0004213"), (0.0000042134, "4.213e-06"), (-0.00042134, "-0.0004213"), (0.91249, "0.9125")],
        *[(0.9953, "0.9953"), (0.998, "0.998"), (0.9998, "0.9998"), (0.99996, "0.99996")],
    ],
)
def test_a_small_loss_has_four_digits_and_is_shown_neither_as_0_nor_as_1(value: float | None, text: str) -> None:
    assert format_score(value) == text


def test_more_digits_where_they_are_asked_for() -> None:
    assert [format_score(value, 5) for value in (1.38204, 0.00042134, 0.5)] == ["1.3820", "0.00042134", "0.5"]


def test_two_figures_are_told_apart() -> None:
    assert format_scores_apart(0.99804, 0.99801) == ("0.99804", "0.99801")
    assert format_scores_apart(0.4, 0.4) == ("0.4", "0.4")
    assert format_scores_apart(2.2541, 2.2539) == ("2.2541", "2.2539")


def test_a_small_loss_is_rounded_by_digits() -> None:
    assert round_score(4.21345678e-7) == 4.21346e-7 and round_score(2.25412345) == 2.25412


def test_a_learner_that_joins_by_hand_is_allocated_from_when_it_joined_to_when_it_left() -> None:
    time = LearnerTime(2)
    time.add_learner(90.0, "a")
    assert time.liveness(95.0) is None and time.goodput(3.0, 95.0) is None, "before the part begins nothing counts"
    time.begin_part(100.0)
    time.add_learner(100.0, "b")
    time.add_learner(104.0, "by-hand")
    assert time.goodput(4 + 4 + 3, 108.0) == pytest.approx(11 / (2 * 4 + 3 * 4))
    time.remove_learner(108.0, "by-hand")
    time.remove_learner(109.0, "b")
    assert time.liveness(110.0) == pytest.approx((10 + 9 + 4) / (2 * 10 + 4)), "b is still meant to be there"
    time.end_part(110.0)
    assert time.liveness(200.0) == pytest.approx((10 + 9 + 4) / (2 * 10 + 4))


def test_goodput_follows_the_number_that_was_asked_for_last() -> None:
    time = LearnerTime(2)
    time.begin_part(0.0)
    time.change_meant(5.0, 4)
    assert time.goodput(12.0, 10.0) == pytest.approx(12 / (2 * 5 + 4 * 5))
    assert time.goodput(1000.0, 10.0) == 1.0
