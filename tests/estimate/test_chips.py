"""One learner's life on its chips, against closed forms."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, median
from typing import Any

import pytest

from atoll.estimate.chips import ChipPlan, Chips, Strike, TimeSpan, return_s, strikes
from atoll.estimate.profile import YEAR_S, Failures, Profile, with_values

HOUR_S = 3600.0


def profile(**values: Any) -> Profile:
    return with_values(Profile(), {key.replace("__", "."): value for key, value in values.items()})


def chips(one: Profile, slices: int = 64, count: float = 150_000.0, seed: int = 0, **more: Any) -> Chips:
    found = Chips(one, slices, count, random.Random(seed), **more)
    found.start(0.0)
    return found


def live(one: Chips, hours: float) -> list[TimeSpan]:
    life: list[TimeSpan] = []
    while not life or life[-1].end < hours * HOUR_S:
        life.append(one.next(life[-1].end if life else 0.0, hours * HOUR_S))
    return life


def seconds(life: list[TimeSpan], kind: str) -> float:
    return sum(one.end - one.start for one in life if one.kind == kind)


def test_a_life_has_no_gaps() -> None:
    life = live(chips(profile(), count=2_400_000.0), 6)
    assert all(before.end == after.start for before, after in itertools.pairwise(life))
    assert {one.kind for one in life} == {"stepping", "scaling down", "scaling up"}


@pytest.mark.parametrize("size", [150_000, 600_000, 2_400_000])
def test_without_elasticity_every_failing_step_costs_an_outage(size: int) -> None:
    """goodput = T / (T + outage · (1 − e^−λT))."""
    one = profile()
    life = live(chips(one, count=float(size), elastic=False), 400)
    failing = -math.expm1(-size * one.step_s / YEAR_S)
    expected = one.step_s / (one.step_s + one.elasticity.outage_s * failing)
    assert seconds(life, "stepping") / life[-1].end == pytest.approx(expected, abs=0.012)


def test_with_elasticity_a_failing_step_costs_one_scaling_down() -> None:
    one, size = profile(), 600_000
    life = live(chips(one, slices=1024, count=float(size)), 400)
    steps = sum(stretch.steps for stretch in life)
    downs = sum(stretch.kind == "scaling down" for stretch in life)
    share = fmean([stretch.share for stretch in life if stretch.kind == "stepping"])
    assert downs / steps == pytest.approx(-math.expm1(-share * size * one.step_s / YEAR_S), rel=0.03)


def test_returns_that_come_together_are_taken_in_together() -> None:
    one = chips(profile(failures__mtbi_s=1e18))
    one._lose(0.0, 3, 22.0)
    one._lose(0.0, 2, 15.0)
    kinds = [stretch.kind for stretch in live(one, 0.1)]
    assert kinds.count("scaling up") == 1 and kinds.count("scaling down") == 1 and one.present == one.slices


def test_what_is_drawn_for_a_return_is_an_exponentiated_weibull() -> None:
    failures, dice = Failures(shape_a=2.0, shape_c=0.8, scale_s=200.0), random.Random(1)
    drawn = [return_s(failures, dice) for _ in range(20_000)]
    for probability in (0.1, 0.5, 0.9):
        quantile = sorted(drawn)[int(probability * len(drawn))]
        cumulative = (1 - math.exp(-((quantile / 200.0) ** 0.8))) ** 2.0
        assert cumulative == pytest.approx(probability, abs=0.015)


def test_measured_returns_take_the_place_of_drawn_ones() -> None:
    dice = random.Random(1)
    assert {return_s(Failures(observed_s=(3.0, 5.0)), dice) for _ in range(50)} == {3.0, 5.0}


def test_time_is_spent_on_failures_and_not_on_healthy_chips() -> None:
    """A thousand times the chips at a thousandth of the failures each: the same life, stretch by stretch."""
    few = live(chips(profile(), count=150_000.0), 24)
    many = live(chips(profile(failures__mtbi_s=1000 * YEAR_S), count=150_000_000.0), 24)
    assert [one.kind for one in few] == [one.kind for one in many]
    assert few[-1].end == pytest.approx(many[-1].end)
    healthy = live(chips(profile(failures__mtbi_s=1e15)), 24 * 365)
    assert len(healthy) <= 2, "a year without a failure is one stretch"


def test_stretches_grow_with_failures_and_no_faster() -> None:
    one, ten = chips(profile(), slices=1024), chips(profile(), slices=1024, count=1_500_000.0)
    small, large = live(one, 48), live(ten, 48)
    assert len(large) / ten.failures <= 1.1 * len(small) / one.failures


def test_a_learner_that_lost_every_slice_is_gone_until_one_is_back_and_then_recovers() -> None:
    one = chips(profile(failures__mtbi_s=1e18, elasticity__recover_s=60.0), slices=4, regional=[Strike(95.0, 500.0)])
    life = live(one, 1)
    kinds = [stretch.kind for stretch in life]
    assert kinds[:4] == ["stepping", "gone", "recovering", "stepping"]
    gone, recovering = life[1], life[2]
    assert gone.start == 100.0, "noticed at the next boundary" and gone.end == 595.0
    assert recovering.end - recovering.start == 60.0


def test_without_elasticity_slices_that_were_taken_away_are_waited_for() -> None:
    one = chips(
        profile(failures__mtbi_s=1e18, preemption__every_s=40 * HOUR_S, preemption__for_s=1800.0), elastic=False
    )
    life = live(one, 200)
    assert seconds(life, "gone") > 0 and all(stretch.share == 1.0 for stretch in life if stretch.kind == "stepping")
    one_slice = 1800.0 / (40 * HOUR_S + 1800.0)
    assert seconds(life, "stepping") / life[-1].end < (1 - one_slice) ** 64 + 0.1


def test_preempted_slices_are_missing_for_their_share_of_the_time() -> None:
    """Present on average: every / (every + for)."""
    settings = {"failures__mtbi_s": 1e18, "elasticity__down_s": 0.0, "elasticity__up_s": 0.0}
    one = chips(profile(**settings, preemption__every_s=20_000.0, preemption__for_s=2000.0))
    life = live(one, 400)
    present = sum((s.end - s.start) * s.share for s in life) / life[-1].end
    assert present == pytest.approx(20_000 / 22_000, abs=0.01)


def test_a_rack_takes_all_its_slices_at_once() -> None:
    one = chips(profile(failures__mtbi_s=1e18, racks__slices=8, racks__mtbi_s=50 * HOUR_S, racks__repair_s=600.0))
    life = live(one, 100)
    shares = {round(64 * stretch.share) for stretch in life if stretch.kind == "stepping"}
    assert shares <= {64, 56, 48, 40, 32} and 56 in shares
    assert one.failures == pytest.approx(100 / 50 * 8, rel=0.6)


def test_regions_strike_as_often_as_they_should() -> None:
    found = strikes(10_000.0, 500.0, -1000.0, 5e7, random.Random(0))
    assert len(found) == pytest.approx(5e7 / 10_500, rel=0.05)
    assert fmean([one.for_s for one in found]) == pytest.approx(500.0, rel=0.06)
    assert all(before.at + before.for_s <= after.at for before, after in itertools.pairwise(found))


@pytest.mark.parametrize(("now_h", "there", "change_h"), [(0, True, 8), (7.5, True, 8), (8, False, 20), (21, True, 32)])
def test_a_plan_over_midnight(now_h: float, there: bool, change_h: float) -> None:
    assert ChipPlan(20.0, 8.0).change(now_h * HOUR_S) == (there, pytest.approx(change_h * HOUR_S))


def test_a_scavenged_learner_is_away_by_day_and_recovers_every_evening() -> None:
    one = chips(profile(failures__mtbi_s=1e18, elasticity__recover_s=60.0), plan=ChipPlan(20.0, 8.0))
    life = live(one, 72)
    assert seconds(life, "away") == pytest.approx(36 * HOUR_S, abs=60)
    assert sum(stretch.kind == "recovering" for stretch in life) == 3


def test_jitter_changes_single_steps_but_not_their_mean() -> None:
    one = chips(profile(failures__mtbi_s=1e18, speed__jitter=0.1))
    lengths = [one.step(0.0, most=1) for _ in range(3000)]
    spans = [stretch.end - stretch.start for stretch in lengths]
    assert fmean(spans) == pytest.approx(10.0, abs=0.1) and median(spans) == pytest.approx(10.0, abs=0.1)
    assert fmean([(span - 10) ** 2 for span in spans]) == pytest.approx(1.0, rel=0.15)


def test_a_step_ends_with_its_slowest_chip() -> None:
    one = chips(profile(failures__mtbi_s=1e18, speed__chip_jitter=0.02), count=100_000.0)
    stretch = one.step(0.0, most=1)
    dice = random.Random(0)
    largest = fmean([max(dice.gauss(0, 1) for _ in range(100_000)) for _ in range(3)])
    assert (stretch.end - stretch.start) / 10 - 1 == pytest.approx(0.02 * largest, rel=0.1)
    assert stretch.useful == pytest.approx(10 / (stretch.end - stretch.start))


def test_a_learner_that_settled_is_in_the_middle_of_things() -> None:
    busy = profile(preemption__every_s=7200.0, preemption__for_s=7200.0)
    settled = [Chips(busy, 64, 64.0, random.Random(seed)) for seed in range(20)]
    first = [one.settle(-5 * 7200.0) for one in settled]
    assert all(stretch.start == 0.0 <= stretch.end for stretch in first)
    assert fmean([one.present for one in settled]) == pytest.approx(32, abs=4)


def test_however_many_fail_in_a_step_no_more_leave_than_are_there() -> None:
    one = chips(profile(failures__mtbi_s=1000.0), slices=64, count=1e9)
    life = live(one, 1)
    assert "gone" in {stretch.kind for stretch in life} and one.present >= 0
    assert one.lost_slices <= sum(64 * stretch.share for stretch in life) + 1e-6
