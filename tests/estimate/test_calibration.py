"""Fitting constants to a table: what it finds, and what is wrong with a table."""

from __future__ import annotations

import pytest

from atoll.estimate.calibration import Known, compare, fit, parse, published, turned, value_of
from atoll.estimate.goodput import Job, run
from atoll.estimate.profile import load, with_values
from atoll.protocol.errors import ConfigError

PAPER = load("paper")


def test_a_constant_that_made_a_table_is_found_again_from_the_table() -> None:
    """Also from far off, and without touching what it was not asked to."""
    true = with_values(PAPER, {"elasticity.outage_s": 40.0})
    known = [
        Known("data-parallel", 1, chips, run(Job(true, "data-parallel", 1, chips, 9, 96.0, 0)).tally.goodput, None)
        for chips in (150_000, 600_000, 2_400_000)
    ]
    heard: list[float] = []
    found = fit(
        PAPER, known, ["elasticity.outage_s"], hours=48.0, seeds=1, progress=lambda done, of, mean: heard.append(mean)
    )
    assert value_of(found.profile, "elasticity.outage_s") == pytest.approx(40.0, rel=0.08)
    assert found.mean < 1.5 and heard == sorted(heard, reverse=True) and len(heard) == 8
    assert found.profile == with_values(PAPER, {"elasticity.outage_s": value_of(found.profile, "elasticity.outage_s")})


def test_constants_joined_by_plus_move_together() -> None:
    moved = turned(PAPER, "elasticity.down_s+elasticity.up_s", 2.0)
    assert (moved.elasticity.down_s, moved.elasticity.up_s) == (26.0, 26.0)


def test_errors_are_in_points_with_their_sign() -> None:
    found = compare(PAPER, [Known("data-parallel", 1, 2_400_000, 0.50, 0.0)], hours=12.0, seeds=1)
    goodput, uptime = found.misses
    assert goodput.error == pytest.approx(18 - 50, abs=2) and uptime.error == pytest.approx(18, abs=2)
    assert found.worst == abs(goodput.error) and found.mean == pytest.approx((32 + 18) / 2, abs=2)


def test_the_published_table_is_read_as_fractions() -> None:
    known = published()
    assert Known("decoupled", 8, 2_400_000, 0.80, 0.99) in known
    assert Known("data-parallel", 1, 150_000, 0.72, None) in known and len(known) == 15


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no figure to fit to"),
        ("method,learners,chips,goodput,uptime\n", "has no figure to fit to"),
        ("method,learners,chips,goodput,uptime\ndecoupled,8,1000,,\n", "has no figure to fit to"),
        ("method,learners,goodput\ndecoupled,8,88\n", "line 2: 'chips' is not understood"),
        ("method,learners,chips,goodput\ndecoupled,eight,1000,88\n", "line 2: invalid literal"),
        ("method,learners,chips,goodput\ndecoupled,8,1000,880\n", "are percent, 0 to 100"),
        ("method,learners,chips,goodput\ndecoupled,8,1000,nan\n", "are percent, 0 to 100"),
        ("method,learners,chips,goodput\nhogwild,8,1000,88\n", "there is no method 'hogwild'"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "mine.csv")
    assert said in str(error.value) and str(error.value).startswith("mine.csv")


@pytest.mark.parametrize("key", ["provenance", "rules.grace", "nothing", "failures", "failures.observed_s"])
def test_only_numbers_can_be_fitted(key: str) -> None:
    with pytest.raises(ConfigError, match="is no number of a profile"):
        value_of(PAPER, key)
