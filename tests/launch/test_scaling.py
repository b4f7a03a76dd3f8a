from __future__ import annotations

from datetime import datetime

import pytest

from atoll.config import ScavengePlan, convert
from atoll.launch.scaling import choose_leavers, choose_newcomers, count_planned, parse_count
from atoll.protocol.errors import ConfigError

NIGHT = ScavengePlan(from_="22:00", to="06:00", learners=4)
NOON = ScavengePlan(from_="12:00", to="13:30", learners=2)


@pytest.mark.parametrize(("word", "count"), [("6", 6), ("+2", 6), ("-3", 1), ("4", 4)])
def test_a_number_is_meant_as_it_stands_or_as_a_change(word: str, count: int) -> None:
    assert parse_count(word, now=4) == count


@pytest.mark.parametrize("word", ["0", "-4", "-5", "two", "", "1.5", "--2", "99999"])
def test_what_is_no_number_of_learners_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        parse_count(word, now=4)


def test_newcomers_take_the_lowest_numbers_that_are_free() -> None:
    assert choose_newcomers({"learner-0", "learner-2", "anna"}, 3) == ["learner-1", "learner-3", "learner-4"]


def test_the_highest_numbers_leave_and_before_them_who_has_none() -> None:
    assert choose_leavers(["learner-2", "learner-10", "learner-0"], 2) == ["learner-10", "learner-2"]
    assert choose_leavers(["learner-2", "extra", "learner-0"], 1) == ["extra"]


@pytest.mark.parametrize(
    ("hour", "planned"),
    [("21:59", 0), ("22:00", 4), ("23:59", 4), ("00:00", 4), ("05:59", 4), ("06:00", 0), ("12:30", 2)],
)
def test_a_plan_counts_from_its_first_minute_to_before_its_last_also_over_midnight(hour: str, planned: int) -> None:
    now = datetime.fromisoformat(f"2026-11-18T{hour}:00")
    assert count_planned(now, (NIGHT, NOON)) == planned


def test_plans_of_the_same_hour_add_up() -> None:
    assert count_planned(datetime(2026, 1, 1, 23), (NIGHT, NIGHT)) == 8


def test_a_plan_is_written_in_the_settings_file() -> None:
    plans = convert({"scavenge": [{"from": "22:00", "to": "06:00", "learners": 4}]}, "run.toml").scavenge
    assert plans == (NIGHT,)


@pytest.mark.parametrize(
    "plan",
    [
        {"from": "24:00", "to": "06:00", "learners": 4},
        {"from": "22:00", "to": "22:00", "learners": 4},
        {"from": "22:00", "to": "6", "learners": 4},
        {"from": "22:00", "to": "06:00", "learners": 0},
        {"from": "22:00", "to": "06:00"},
        {"from": "22:00", "to": "06:00", "learners": 4, "day": 1},
    ],
)
def test_a_plan_that_says_nothing_sensible_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        convert({"scavenge": [plan]}, "run.toml")
