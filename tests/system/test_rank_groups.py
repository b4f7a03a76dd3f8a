"""`atoll train --ranks`: groups of ranks as learners of a run. test_ranks.py has their arithmetic."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.system.conftest import Run, members

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
GROUPS = ("--learners", "2", "--ranks", "2")


def check_end(run: Run) -> None:
    """Nothing is lost on the way, and what was written is as the journal says."""
    assert run.summary["failure"] is None and run.summary["tokens"]["in_flight"] == 0
    assert run.ask("verify", run.out).returncode == 0


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_killed_rank_brings_its_learner_back_as_one(run: Run, parallel: str) -> None:
    words = ("--steps", "300", "--set", "workload.pace_s=0.1", "--set", f"workload.parallel={parallel}")
    run.train(*GROUPS, *words, replayed=False)
    run.until(lambda events: {("learner-0", 1), ("learner-1", 1)} <= members(events))
    [started] = [event for event in run.events("started") if event["process"] == "learner-1"]
    os.kill(started["ranks"]["learner-1.rank1"], signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    [exited] = [event for event in run.events("exited") if event["process"] == "learner-1"]
    assert exited["text"] == "learner-1 rank 1 ended: killed by SIGKILL"
    [restarted] = run.events("restarted")
    assert restarted["text"].startswith("learner-1 was started again, all 2 ranks of it, with ")
    run.interrupt()
    run.ended()
    check_end(run)
    assert {path.stem for path in run.out.glob("logs/learner-*")} == {
        f"learner-{learner}{rank}" for learner in (0, 1) for rank in ("", ".rank1")
    }


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_the_example_trains_in_ranks(run: Run, layout: str) -> None:
    run.train(ROOT / "examples" / "ranks.py", *GROUPS, "--steps", "200", "--", layout).ended()
    check_end(run)
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
