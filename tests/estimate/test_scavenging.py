"""What compute that comes and goes gains: the published figures, the closed form, days and nights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.estimate.upsizing import DailyHours, scavenge, train_time
from atoll.protocol.errors import ConfigError

hours = st.integers(0, 24 * 60).map(lambda minutes: minutes / 60)  # nobody plans by 1e-55 of an hour
plans = st.tuples(hours, hours).filter(lambda pair: pair[0] % 24 != pair[1] % 24).map(lambda pair: DailyHours(*pair))


@pytest.mark.parametrize(("extra", "published"), [(0.25, 0.90), (1.0, 0.75)])
def test_the_published_train_times_come_out(extra: float, published: float) -> None:
    assert train_time(extra) == pytest.approx(published)


@given(work_h=st.floats(0.1, 2000), extra=st.floats(0, 10), plan=plans, start_h=hours)
def test_a_plan_takes_what_the_closed_form_says_for_its_share(
    work_h: float, extra: float, plan: DailyHours, start_h: float
) -> None:
    finish = scavenge(work_h, extra, plan, start_h)
    assert -1e-9 <= finish.share <= 1 + 1e-9
    assert finish.after_h == pytest.approx(work_h * train_time(extra, min(1.0, max(0.0, finish.share))))


@given(extra=st.floats(0, 10), plan=plans, days=st.integers(1, 60))
def test_whole_days_do_the_work_that_their_hours_hold(extra: float, plan: DailyHours, days: int) -> None:
    there_h = (plan.ends_h - plan.begins_h) % 24
    work_h = days * (24 + extra * there_h)
    assert scavenge(work_h, extra, plan).after_h == pytest.approx(24 * days)


def test_a_night_shift_goes_over_midnight() -> None:
    night = DailyHours(20, 8)
    assert [night.there(hour) for hour in (0, 7.9, 8, 19.9, 20, 23)] == [True, True, False, False, True, True]
    assert scavenge(16 + 12, 1.0, night).after_h == 20, "8 h at twice the rate, 12 h alone"


def test_all_day_is_a_plan_and_nothing_is_none() -> None:
    assert scavenge(100.0, 1.0, DailyHours(0, 24)).after_h == 50
    for begins, ends in [(0, 0), (24, 0), (24, 24), (5, 5)]:
        with pytest.raises(ConfigError, match="no time at all"):
            DailyHours(begins, ends)


@pytest.mark.parametrize("extra", [-0.1, float("inf"), float("nan")])
def test_compute_that_is_taken_away_is_refused(extra: float) -> None:
    with pytest.raises(ConfigError, match="must not be below 0"):
        train_time(extra)
