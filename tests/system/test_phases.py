"""A real run with a warm start: learners and syncer are killed in it, and the run is repeated bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
from tests.system.conftest import Event, Run, members

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults]

WARM = (
    *("--learners", "2", "--steps", "400", "--warm-start", "0.5", "--set", "evaluate_every=0"),
    *("--set", "workload.depth=1", "--set", "workload.block=16", "--set", "workload.batch=4"),
    *("--set", "workload.pace_s=0.05"),  # so that what is killed is back before the run is over, however fast it steps
    *("--set", "fragments=4", "--set", "sync_every=12", "--set", "cut_every=24"),
)


def phases(events: list[Event]) -> list[int]:
    return [event["training_phase"] for event in events if event["kind"] == "phase"]


def test_kills_in_a_warm_start_cost_nothing_and_the_run_is_repeated(run: Run) -> None:
    run.train(*WARM)
    run.until(lambda events: len(members(events)) == 2)
    said = run.ask("set", run.out, "sync_every=3", "outer_lr=0.9").stdout
    assert "sync_every=3 outer_lr=0.9 (until phase 2 of 2 begins, at 0.5 of the run)" in said
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: phases(events) == [1, 2])
    run.ended()
    [changed] = run.events("changed")
    assert changed["at"] < run.events("phase")[1]["at"]
    rounds = run.events("round")
    begins = run.events("phase")[1]["at"]
    warm = [one for one in rounds if one["at"] < begins]
    assert len(warm) > 200 * 4 / 12, "more rounds than H = 12 would have had in these steps"
    assert run.events("ending")[0]["text"].startswith("the run ends: 400 steps")
    assert verify_run(run.out).ok
    run.check_replay()


def test_a_drawn_tape_with_a_warm_start_is_followed_and_repeated(run: Run) -> None:
    words = ("--learners", "2", "--steps", "60", "--warm-start", "0.4", "--fault", "kill:learner-1@12+8")
    assert run.command("simulate", "tape", "warm.tape", *words).returncode == 0
    run.train("--tape", "warm.tape", "--set", "workload.depth=1", "--set", "workload.block=16", replayed=False)
    run.ended()
    assert verify_run(run.out).ok
    assert run.replay()["identical"]
