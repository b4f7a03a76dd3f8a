"""What a run's events say about its machines."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.estimate.goodput import Job, run
from atoll.observe.clusters import measure_run
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event

SETTINGS = {"learners": 2, "fragments": 4, "sync_every": 8, "overlap": 2, "quorum": 1, "quorum_policy": "grace"}


def event(at: float, kind: str, **more: Any) -> Event:
    return {"at": at, "kind": kind, "text": kind, **more}


def one_of(learner: str, incarnation: int = 1, **more: Any) -> dict[str, Any]:
    return {"learner": learner, "incarnation": incarnation, **more}


def a_run(*, killed: bool = True) -> list[Event]:
    """100 s of two learners; steps of 0.5 s, 0.4 s of it work. b begins 4 s late; a dies at 50 and is away for 10 s."""
    death = [
        event(60.0, "killed", process="a"),
        event(60.1, "left", **one_of("a", t=100, tokens=1000, busy_s=40.0)),
        event(66.0, "joined", **one_of("a", 2)),
        event(70.0, "recovered", **one_of("a", 2)),
    ]
    last = one_of("a", 2, t=80, tokens=800, busy_s=32.0) if killed else one_of("a", t=200, tokens=2000, busy_s=80.0)
    return [
        event(0.0, "run", run="r", learners=2, settings=SETTINGS),
        event(9.0, "joined", **one_of("a")),
        event(10.0, "recovered", **one_of("a")),
        event(13.0, "joined", **one_of("b")),
        event(14.0, "recovered", **one_of("b")),
        *(death if killed else []),
        event(110.0, "ending", reason="enough"),
        event(111.0, "left", **last),
        event(111.0, "left", **one_of("b", t=192, tokens=1920, busy_s=76.8)),
        event(112.0, "finished", reason="enough", tokens=None),
    ]


def test_steps_deaths_and_recoveries_come_from_the_events() -> None:
    found = measure_run(a_run(), "atoll-runs/mine")
    assert (found.learners, found.wall_s, found.deaths) == (2, 100.0, 1)
    profile = found.profile
    assert profile.provenance == "measured in atoll-runs/mine" and profile.slices == 2
    assert profile.step_s == pytest.approx(0.5) and profile.speed.idle == pytest.approx(0.2)
    assert profile.failures.observed_s == (pytest.approx(10.0),)
    assert profile.failures.mtbi_s == pytest.approx(186.0)
    assert sorted(profile.elasticity.start_s) == [0.0, 4.0]
    assert (profile.rules.sync_every, profile.rules.fragments) == (8, 4)
    assert found.goodput == pytest.approx((40 + 32 + 76.8) / 200)


def test_the_prediction_comes_near_what_was_measured() -> None:
    found = measure_run(a_run(), "it")
    job = Job(found.profile, "decoupled", 2, 2, 0, found.wall_s / 3600, 0)
    predicted = sum(run(Job(*_fields(job, seed))).tally.goodput for seed in range(400)) / 400
    assert predicted == pytest.approx(found.goodput, abs=0.015)


def _fields(job: Job, seed: int) -> tuple[Any, ...]:
    return job.profile, job.method, job.learners, job.chips, seed, job.hours, job.rounds


def test_a_run_in_which_nobody_died_predicts_itself() -> None:
    found = measure_run(a_run(killed=False), "it")
    assert found.deaths == 0
    outcome = run(Job(found.profile, "decoupled", 2, 2, 0, found.wall_s / 3600, 0))
    assert outcome.tally.goodput == pytest.approx(found.goodput, abs=0.02)
    assert outcome.tally.uptime == pytest.approx(1.0, abs=0.045)


def test_one_that_never_came_back_counts_as_gone_for_the_rest() -> None:
    events = [one for one in a_run() if one.get("incarnation") != 2]
    found = measure_run(events, "it")
    assert found.deaths == 1 and found.profile.failures.observed_s == (pytest.approx(50.0),)


def test_a_run_without_steps_teaches_nothing() -> None:
    with pytest.raises(ConfigError, match="it holds no steps to learn from"):
        measure_run([event(0.0, "run", run="r", learners=2, settings=SETTINGS)], "it")
