"""Experiments: the shipped protocol between learners that fail, and the published tables."""

from __future__ import annotations

import random
from statistics import fmean

import msgspec
import pytest

from atoll.estimate import calibration, goodput
from atoll.estimate.goodput import Job, JobResult, cells, experiments, gather, interval, run
from atoll.estimate.profile import load, with_values
from atoll.protocol.errors import ConfigError

PAPER = load("paper")
CALM = with_values(PAPER, {"failures.mtbi_s": 1e18, "slices": 8})


def job(
    method: goodput.Method, learners: int, chips: int, *, hours: float = 24.0, rounds: int = 0, seed: int = 0
) -> Job:
    return Job(PAPER, method, learners, chips, seed, hours, rounds)


def test_the_published_cells_come_out() -> None:
    found = calibration.compare(PAPER, calibration.published(), hours=48.0, seeds=1)
    assert len(found.misses) == 23
    assert found.mean <= 1.5 and found.worst <= 6.0, [(m.method, m.chips, m.error) for m in found.misses]


@pytest.mark.parametrize(
    ("learners", "chips"), [(1, 150_000), pytest.param(2, 300_000, marks=pytest.mark.faults), (4, 600_000)]
)
@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_as_many_times_the_learners_on_as_many_times_the_chips_give_the_same(
    learners: int, chips: int, times: int
) -> None:
    one: goodput.Method = "elastic-data-parallel" if learners == 1 else "decoupled"
    small = fmean([run(job(one, learners, chips, seed=seed)).tally.goodput for seed in range(3)])
    large = fmean([run(job("decoupled", times * learners, times * chips, seed=s)).tally.goodput for s in range(3)])
    assert abs(small - large) <= 0.02


def test_the_same_seed_gives_the_same_experiment() -> None:
    one = job("decoupled", 4, 1_200_000, hours=2, rounds=40)
    assert run(one) == run(one) != run(msgspec.structs.replace(one, seed=1))


def test_nobody_waits_whatever_happens_to_the_others() -> None:
    """Decoupled goodput with rounds is goodput without: rounds cost a learner nothing."""
    outcome = run(job("decoupled", 4, 2_400_000, hours=6, rounds=80))
    assert outcome.rounds is not None and outcome.rounds.count >= 80
    assert "waiting" not in outcome.tally.lost
    without = [run(job("decoupled", 4, 2_400_000, hours=6, seed=seed)).tally.goodput for seed in range(5)]
    assert outcome.tally.goodput == pytest.approx(fmean(without), abs=0.03)
    assert outcome.rounds.participation is not None and 0.9 < outcome.rounds.participation <= 1.0
    assert outcome.rounds.effective_h == pytest.approx(24, abs=3)


def test_learners_of_spread_speeds_have_their_own_merged_share() -> None:
    """A quarter slower: of its work a bit less is merged than of the others', and it is told apart from the mean."""
    profile = with_values(CALM, {"speed.spread": 0.25, "speed.jitter": 0.01})
    one = msgspec.structs.replace(job("decoupled", 4, 150_000, hours=6, rounds=150), profile=profile)
    outcome = run(one)
    assert outcome.rounds is not None and len(outcome.rounds.shares) == 4
    assert all(share is not None and 0.0 < share < 1.0 for share in outcome.rounds.shares)
    found = gather(one, [outcome])
    assert found.merged_share_slowest == outcome.rounds.shares[-1]
    assert found.merged_share_mean == fmean([share for share in outcome.rounds.shares if share is not None])
    assert found.merged_share == outcome.rounds.merged_share


def mixed(method: goodput.Method, overlap: int) -> JobResult:
    """The slowest learner 18 % slower, 10 % jitter."""
    profile = with_values(CALM, {"speed.spread": 0.18, "speed.jitter": 0.1, "rules.overlap": overlap})
    return run(Job(profile, method, 8, 8, 0, 6.0, 60))


def test_a_barrier_costs_mixed_learners_a_sixth_and_a_quorum_of_one_with_grace_nothing() -> None:
    """Published: 84 % and 100 %."""
    barrier, free = mixed("streaming-diloco", 0), mixed("decoupled", 2)
    assert barrier.tally.goodput == pytest.approx(0.84, abs=0.025)
    assert barrier.rounds is not None and barrier.rounds.participation == 1.0
    assert free.tally.goodput > 0.999
    assert free.rounds is not None and free.rounds.participation is not None and free.rounds.participation > 0.9


def test_spread_speeds_are_all_in_each_round_with_grace_and_nearly_without() -> None:
    profile = with_values(CALM, {"speed.spread": 0.18, "speed.jitter": 0.1})
    without = with_values(profile, {"rules.grace": False})
    rounds = [run(Job(one, "decoupled", 8, 8, 0, 6.0, 60)).rounds for one in (profile, without)]
    shares = [one.participation for one in rounds if one is not None and one.participation is not None]
    assert shares[0] >= shares[1] > 0.99, "readiness per fragment leaves little to wait for"


def test_where_learners_wait_a_slow_one_costs_everybody() -> None:
    outcome = run(Job(with_values(CALM, {"speed.spread": 1.0}), "synchronous-diloco", 8, 8, 0, 12.0, 10))
    assert outcome.tally.goodput == pytest.approx(0.75, abs=0.02), "mean speed over the slowest: 1.5 / 2"
    assert outcome.tally.lost["waiting"] == pytest.approx(0.25, abs=0.02)


def test_a_data_parallel_job_steps_with_its_slowest_part() -> None:
    outcome = run(Job(with_values(CALM, {"speed.spread": 0.5}), "elastic-data-parallel", 1, 8, 0, 1.0, 0))
    assert outcome.tally.goodput == pytest.approx(1.25 / 1.5)
    assert outcome.tally.lost == {"idle in steps": pytest.approx(0.25 / 1.5)}


def test_a_syncer_that_dies_costs_rounds_and_no_goodput() -> None:
    dying = with_values(CALM, {"syncer.mtbf_s": 600.0, "syncer.down_s": 120.0})
    calm, hit = (run(Job(one, "decoupled", 4, 8, 0, 2.0, 300)) for one in (CALM, dying))
    assert hit.tally.goodput == pytest.approx(calm.tally.goodput, abs=0.001)
    assert calm.rounds is not None and hit.rounds is not None
    assert hit.rounds.seconds > 1.08 * calm.rounds.seconds


def test_a_region_that_fails_takes_its_learners_and_no_others() -> None:
    profile = with_values(CALM, {"regions.count": 2, "regions.mtbi_s": 20_000.0, "regions.repair_s": 2000.0})
    outcome, lives = goodput.live(Job(profile, "decoupled", 4, 8, 3, 48.0, 0))
    gone = [{round(one.start) for one in life if one.kind == "gone"} for life in lives]
    assert gone[0] == gone[2] != gone[1] == gone[3] and gone[0]
    assert outcome.tally.uptime > outcome.tally.goodput + 0.03


def test_a_learner_that_lost_every_slice_is_a_dead_process_that_comes_back() -> None:
    profile = with_values(CALM, {"slices": 4, "preemption.every_s": 900.0, "preemption.for_s": 120.0})
    outcome = run(Job(profile, "decoupled", 4, 8, 0, 1.0, 100))
    assert outcome.rounds is not None and outcome.rounds.count >= 100
    assert outcome.tally.lost["gone"] == pytest.approx(120 / (900 + 120 + 60), abs=0.07)
    assert outcome.tally.lost["recovering"] > 0


@pytest.mark.parametrize(("extra", "published"), [(1, 0.90), (4, 0.75)])
def test_scavenged_learners_shorten_the_run_as_the_closed_form_says(extra: int, published: float) -> None:
    """Extra learners for half of the FLOPs: 0.5 + 0.5 / (1 + f). Here for 1 / (2 + f) of each day, in which they and
    the others do as much as the others alone in the rest."""
    share = extra / 4
    hours = 24 / (2 + share)
    profile = with_values(
        CALM,
        {"scavenged.learners": extra, "scavenged.from_h": 0.0, "scavenged.to_h": hours, "elasticity.recover_s": 0.0},
    )
    alone, helped = (run(Job(one, "decoupled", 4, 8, 0, 240.0, 0)) for one in (CALM, profile))
    assert alone.tokens_per_hour / helped.tokens_per_hour == pytest.approx(published, abs=0.005)
    assert helped.tally.goodput > 0.99, "hours away are nobody's"


def test_the_table_has_each_method_where_it_belongs() -> None:
    jobs = experiments(
        PAPER, ["data-parallel", "elastic-data-parallel", "decoupled"], [1, 2], [150_000], hours=1, rounds=9
    )
    assert [(one.method, one.learners) for one in jobs] == [
        ("data-parallel", 1),
        ("elastic-data-parallel", 1),
        ("decoupled", 2),
    ]
    alone = experiments(PAPER, ["decoupled"], [1, 2], [150_000], hours=1, rounds=9)
    assert [one.learners for one in alone] == [1, 2], "one learner under the protocol, where it is asked for by name"


def test_workers_find_what_one_process_finds() -> None:
    jobs = experiments(PAPER, ["elastic-data-parallel", "decoupled"], [1, 2], [150_000, 600_000], hours=1, rounds=12)
    heard: list[int] = []
    found = cells(jobs, 2, workers=2, progress=lambda done, of: heard.append(done))
    assert found == cells(jobs, 2) and heard == list(range(1, 9))


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    dice, inside = random.Random(0), 0
    for _ in range(1000):
        low_high = interval([dice.gauss(5.0, 1.0) for _ in range(5)])
        assert low_high is not None
        inside += low_high[0] <= 5.0 <= low_high[1]
    assert 925 <= inside <= 975
    assert interval([1.0]) is None
    assert interval([0.99, 1.0], most=1.0) == (pytest.approx(0.99 - 0.0585, abs=1e-3), 1.0)


def test_a_cell_gathers_its_seeds() -> None:
    one = job("decoupled", 8, 1_200_000, hours=6)
    found = gather(one, [run(msgspec.structs.replace(one, seed=seed)) for seed in range(4)])
    assert found.seeds == 4 and found.goodput_interval is not None
    assert found.goodput_interval[0] < found.goodput < found.goodput_interval[1]
    assert found.goodput + sum(found.lost.values()) == pytest.approx(1.0)
    assert found.participation is None and found.effective_h is None and found.merged_share_slowest is None
    assert found.tokens_per_hour == pytest.approx(found.goodput * 1_200_000 * 500 * 3600)


@pytest.mark.parametrize(
    ("learners", "chips", "hours", "said"),
    [
        (3, 150_000, 1.0, "1024 slices cannot be dealt evenly to 3 learners: take --learners 2, or --slices 1023"),
        (2048, 150_000, 1.0, "learners = 2048: it must be above 0, and at most 1,024"),
        (0, 150_000, 1.0, "learners = 0: it must be above 0"),
        (2, -5, 1.0, "chips = -5: it must be above 0"),
        (2, 10**30, 1.0, "chips = 1e+30: it must be above 0, and at most 1,000,000,000,000"),
        (2, 150_000, float("nan"), "hours = nan"),
        (2, 150_000, float("inf"), "hours = inf"),
        (2, 100, 1.0, "100 chips cannot make 1024 slices: take --slices 100 or fewer"),
        (2, 150_000, 0.0, "hours = 0: it must be above 0"),
    ],
)
def test_what_cannot_be_is_said(learners: int, chips: int, hours: float, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job(PAPER, "decoupled", learners, chips, 0, hours, 0)
    assert said in str(error.value)
