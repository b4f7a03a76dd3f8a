"""A user's own figures, from the scorer to the summary, the best model and what shows them."""

from __future__ import annotations

import json
import runpy

import pytest
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, Run

from atoll.store.rundir import read_model_facts

pytestmark = pytest.mark.system


@pytest.mark.faults
def test_a_run_of_a_users_own_script_is_told_in_its_own_words(run: Run) -> None:
    words = ("--learners", "2", "--steps", "200", "--set", "evaluate_every=4", "--set", "wait_for_learners_s=55")
    run.train(SCRIPTS / "scored.py", *words, "--set", "tail_average=3").ended()
    summary = run.summary
    accuracy = summary["metrics"]["accuracy"]
    assert accuracy["direction"] == "max" and accuracy["best"] >= accuracy["end"] > accuracy["start"]
    assert summary["training_loss_end"] is not None and summary["loss_unit"] == ""
    assert "nats per byte" not in run.stdout and "Its accuracy went from" in run.stdout
    assert all(one["loss"] is not None for one in run.events("round")[-1]["members"])
    assert max(one["at"] for one in run.events("joined")) <= run.events("initial")[0]["at"], "the run waited for both"

    assert run.command("verify", run.out).returncode == 0
    assert run.command("export", run.out, "tail.safetensors", "--tail", "3").returncode == 0
    kept, made = load_file(run.out / "model-tail.safetensors"), load_file(run.folder / "tail-tail.safetensors")
    assert kept.keys() == made.keys() and all(kept[name].equal(made[name]) for name in kept)
    assert {"rho", "outer_step"} <= run.events("round")[-1].keys()

    done = run.command("export", run.out, "best.safetensors", "--best")
    assert done.returncode == 0, done.stderr
    script = runpy.run_path(str(SCRIPTS / "scored.py"))
    script["model"].load_state_dict(load_file(run.folder / "best.safetensors"))
    facts = read_model_facts(run.folder / "best.safetensors")
    assert script["score"](script["model"])["loss"] == pytest.approx(float(facts["score"]), rel=1e-6)
    assert float(facts["score"]) == pytest.approx(summary["validation_loss_best"], rel=1e-6)

    assert "accuracy" in run.command("status", run.out).stdout
    assert json.loads(run.command("ls", "--json").stdout)[0]["state"] == "ended"
    assert "==> evaluator <==" in run.command("logs", run.out).stdout
