"""Whole runs in which something dies, breaks or is interrupted."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.system.conftest import SCRIPTS, Run, members

pytestmark = pytest.mark.system

LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "overlap=1")


@pytest.mark.faults
def test_a_killed_learner_comes_back_and_the_others_go_on(run: Run) -> None:
    run.train(*LINE, "--learners", "2", "--steps", "20000", "--kill", "learner-1@0.002")
    run.until(lambda events: ("learner-1", 2) in members(events))
    run.interrupt()
    run.ended()
    summary = run.summary
    assert summary["kills"] == summary["restarts"] == 1
    assert [entry["after"] for entry in summary["recovery"]] == ["killed", "restarted"]
    killed, back = (next(e["at"] for e in run.events(kind) if e["at"] > 0) for kind in ("killed", "restarted"))
    recovered = next(e["at"] for e in run.events("recovered") if e["incarnation"] == 2)
    alone = [e for e in run.events("round") if killed < e["at"] < recovered]
    assert len(alone) > 10, "the other learner's rounds go on"
    assert recovered - back < 30, "generous: other tests run beside this one; `make run` shows under 10 s"


@pytest.mark.faults
def test_a_second_interrupt_kills_everything(run: Run) -> None:
    run.train(*LINE, "--learners", "2", "--", "--deaf")
    run.until(lambda events: len(members(events)) == 2)
    run.interrupt()
    run.until(lambda events: any(e["kind"] == "ending" for e in events))
    run.interrupt()
    run.ended(code=130)
    assert run.stderr.startswith("atoll: everything was killed") and run.stderr.count("\n") == 1


def test_nothing_outlives_a_killed_supervisor(run: Run) -> None:
    run.train(*LINE, "--learners", "1")
    run.until(lambda events: bool(members(events)))
    run.signal(signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    run.until_gone(30)
    assert run.events("ending")[0]["text"].startswith("the run ends: its supervisor is gone")
    assert (run.out / "model.safetensors").exists()


@pytest.mark.faults
def test_a_syncer_that_dies_is_started_again_and_learners_rejoin(run: Run) -> None:
    run.train(*LINE, "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("syncer"), signal.SIGKILL)

    def after(events: list[dict[str, object]]) -> list[dict[str, object]]:
        again = [i for i, e in enumerate(events) if e["kind"] == "reigned"]
        return events[again[0] :] if again else []

    run.until(lambda events: len(members(after(events))) == 2)
    run.interrupt()
    run.ended()
    assert run.events("restarted")[0]["process"] == "syncer"
    assert not any(e["process"].startswith("learner") for e in run.events("restarted"))
    rounds = [e["round"] for e in run.events("round", "passed")]
    assert rounds == sorted(set(rounds)), "every round once, over both terms"
    assert run.summary["tokens"]["lost"] == 0


@pytest.mark.faults
def test_a_nan_step_in_one_of_four_learners(run: Run) -> None:
    """Its momentum is broken too: refused three times, it recovers with a fresh optimizer and contributes again."""
    calm = ("--set", "merge=mean", "--set", "outer_lr=1", "--set", "outer_momentum=0")
    run.train(*LINE, "--learners", "4", "--steps", "100000", *calm, "--", "--nan-at", "30")
    run.until(lambda events: ("learner-1", 2) in members(events) and len(members(events)) >= 5)
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > 500)
    run.interrupt()
    run.ended()
    refused = run.events("refused")
    assert len(refused) == 3
    assert all(e["learner"] == "learner-1" and "not finite" in e["reason"] for e in refused)
    assert [e["learner"] for e in run.events("quarantined")] == ["learner-1"], "once is enough"
    model = load_file(run.out / "model.safetensors")
    assert np.abs(model["weight"] - 2 * np.eye(4)).max() < 0.2, "the run learned what it was to learn"
    assert np.abs(model["bias"] - 1).max() < 0.2


@pytest.mark.faults
def test_a_model_that_differs_is_refused_and_the_others_go_on(run: Run) -> None:
    """With an evaluator, for which this script brings no scorer: the run says so and does not wait for it."""
    run.train(SCRIPTS / "line.py", "--learners", "3", "--steps", "100000", "--set", "overlap=1", "--", "--odd", "5")
    run.until(lambda events: any("cannot take part" in e["text"] for e in events if e["kind"] == "warning"))
    run.until(lambda events: any("brings no scorer" in e["text"] for e in events if e["kind"] == "warning"))
    run.until(lambda events: len(members(events)) == 2)
    run.interrupt()
    run.ended()
    refused = run.events("refused")
    assert {e["learner"] for e in refused} == {"learner-1"}
    assert "is (5,) here, (4,) in the run" in refused[0]["text"] or "is (5, 5) here" in refused[0]["text"]
    warnings = [e["text"] for e in run.events("warning")]
    assert any("learner-1 cannot take part" in text and "(5" in text for text in warnings)
    assert any("brings no scorer" in text for text in warnings)
    assert run.summary["rounds"] > 0
    assert not run.events("restarted")
