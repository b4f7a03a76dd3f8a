"""The moving average of a run: scored, kept through a kill of everything, exported as it was scored."""

from __future__ import annotations

import runpy

import pytest
from safetensors.torch import load_file
from tests.integrations.conftest import EXAMPLES, end_at
from tests.system.conftest import Event, Run

from atoll.store.rundir import read_model_facts

pytestmark = pytest.mark.system
SCRIPT = EXAMPLES / "recipes" / "ema.py"


def averages(events: list[Event]) -> int:
    return sum("ema_loss" in (event.get("metrics") or {}) for event in events)


def test_the_average_outlives_a_kill_of_everything_and_is_exported_as_it_was_scored(run: Run) -> None:
    short = ("--set", "sync_every=4", "--set", "evaluate_every=8", "--set", "cut_every=8")
    run.train(SCRIPT, "--learners", "2", "--steps", "100000", *short)
    run.until(lambda events: averages(events) >= 3)
    run.kill_everything()
    before = read_model_facts(run.out / "model-ema.safetensors")
    assert int(before["models"]) >= 3 and before["decay"] == "0.8"

    scored = averages(run.events())
    run.start("train", "--resume", run.out)
    run.until(lambda events: averages(events) >= scored + 2)
    end_at(run, steps=60)
    after = read_model_facts(run.out / "model-ema.safetensors")
    assert after["run"] == before["run"] and int(after["models"]) > int(before["models"])
    ema = run.summary["metrics"]["ema_loss"]
    assert ema["direction"] == "min" and ema["end"] < ema["start"]

    exported = run.ask("export", run.out, "averaged.safetensors", "--ema")
    assert f"{after['models']} models to round {after['round']}, decay 0.8" in exported.stdout, exported.stderr
    script = runpy.run_path(str(SCRIPT))
    script["model"].load_state_dict(load_file(run.folder / "averaged.safetensors"))
    assert script["score"](script["model"]) == pytest.approx(ema["end"], rel=1e-5)
    refused = run.ask("export", run.out, "one.safetensors", "--ema", "--best")
    assert refused.returncode == 2 and "--best and --ema name different models: give one of them" in refused.stderr
    assert run.ask("verify", run.out).returncode == 0
