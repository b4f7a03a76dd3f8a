"""Each script of docs/recipes.md trains with two learners and does what its page says of it; ema.py: tests/system."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations.conftest import EXAMPLES, Run

pytestmark = pytest.mark.integrations
RECIPES = EXAMPLES / "recipes"
SHORT = ("--learners", "2", "--set", "sync_every=8", "--set", "evaluate_every=8")


def train(run: Run, name: str, *script: str | Path, more: tuple[str, ...] = ()) -> Path:
    path = RECIPES / f"{name}.py"
    run.train(path, *SHORT, *more, "--steps", "80", *(("--", *script) if script else ())).ended()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    return path


@pytest.mark.parametrize("name", ["clipping", "compiled"])
def test_a_recipe_trains(run: Run, name: str) -> None:
    train(run, name)
    run.check_replay()


def test_a_recipe_is_compared_with_data_parallel_as_it_is(run: Run) -> None:
    run.start("compare", RECIPES / "clipping.py", *SHORT, "--tokens", "8000", "--out", run.out).ended()
    assert "validation loss over tokens" in run.stdout
    for method in ("decoupled", "data-parallel"):
        summary = json.loads((run.out / method / "summary.json").read_text())
        assert summary["tokens"]["computed"] >= 8000
        assert summary["validation_loss_end"] < summary["validation_loss_start"]


def test_accumulated_batches_are_one_step_with_their_samples(run: Run) -> None:
    train(run, "accumulation")
    assert all(one["tokens"] == 4 * 16 * one["steps"] for one in run.summary["per_learner"].values())


def test_one_learner_writes_checkpoints_and_the_last_is_the_model_of_the_run(run: Run) -> None:
    path = train(run, "checkpoints", run.folder / "checkpoints")
    names = sorted(file.name for file in (run.folder / "checkpoints").iterdir())
    assert (
        names[0] == "final.safetensors" and re.fullmatch(r"step-\d{6}\.safetensors", names[1]) and "draft" not in names
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(path), str(run.folder / "alone")])
        script = runpy.run_path(str(path))
    script["model"].load_state_dict(load_file(run.folder / "checkpoints" / "final.safetensors"))
    assert script["score"](script["model"]) == pytest.approx(run.summary["validation_loss_end"], rel=1e-5)


def test_validation_has_two_figures_and_the_best_model_is_exported(run: Run) -> None:
    train(run, "validation")
    accuracy = run.summary["metrics"]["accuracy"]
    assert accuracy["direction"] == "max" and accuracy["best"] > accuracy["start"]
    assert run.command("export", run.out, "best.safetensors", "--best").returncode == 0


@pytest.mark.parametrize(("rule", "begins"), [("budget", 0.5), ("added", 0.0)])
def test_a_resume_with_twice_the_steps_sets_the_cosine_back_as_the_rule_says(
    run: Run, rule: str, begins: float
) -> None:
    """Learners that wait hear of every round before the next step, however fast this model trains."""
    train(run, "cosine", more=("--set", "synchronous=true"))
    log = run.out / "logs" / "learner-0.log"
    before = len(log.read_text())
    run.start("train", "--resume", run.out, "--steps", "160", "--set", f"progress={rule}").ended()
    said = re.findall(r"^progress ([\d.]+),", log.read_text()[before:], re.MULTILINE)
    assert [float(one) for one in said] == pytest.approx([begins + (1 - begins) * n / 4 for n in range(4)], abs=0.05)
