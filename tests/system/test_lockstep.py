"""The loop in lockstep behind docs/quality.md against real processes, under the tape of a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.system.conftest import Run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import lockstep_follow

pytestmark = [pytest.mark.system, pytest.mark.faults]
SCRIPT = Path(lockstep_follow.__file__)


@pytest.mark.parametrize("words", [("--warm-start", "0.3"), ("--set", "synchronous=true", "--set", "overlap=1")])
def test_the_loop_in_lockstep_comes_to_every_version_of_a_real_run(run: Run, words: tuple[str, ...]) -> None:
    run.train(SCRIPT, "--learners", "2", "--steps", "80", *words)
    run.ended()
    [plan], rounds = run.events("plan"), run.events("round")
    assert lockstep_follow.follow(run.out) == len(rounds)
    assert len(rounds) > plan["settings"]["fragments"], "not only the rounds of the last cycle, which has no pace"


def test_a_step_that_goes_another_way_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(SCRIPT, "--learners", "2", "--steps", "30")
    run.ended()
    monkeypatch.setattr(lockstep_follow, "HORIZON", lockstep_follow.HORIZON + 1)
    with pytest.raises(SystemExit, match="version 1 of fragment 0 differs"):
        lockstep_follow.follow(run.out)
