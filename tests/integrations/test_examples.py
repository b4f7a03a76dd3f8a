"""Each example trains with two learners; its export, loaded into the bare model, scores as the run did."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations.conftest import ENDLESS, EXAMPLES, Run, kill_and_see_back

pytestmark = pytest.mark.integrations
MORE = ("muon", "digits_cnn")


def load_back(run: Run, script: Path) -> None:
    """Into the model that the script makes; every one of its tensors is in the export, tied ones once."""
    file = run.folder / "exported.safetensors"
    exported = run.command("export", run.out, file)
    assert exported.returncode == 0, exported.stderr
    names = runpy.run_path(str(script))  # alone, which is one short pass
    model, score = names["model"], names["score"]
    found = model.load_state_dict(load_file(file), strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    assert set(found.missing_keys) <= tied and not found.unexpected_keys
    assert score(model) == pytest.approx(run.summary["validation_loss_end"], abs=2e-4)


def test_an_attached_loop_trains_in_a_run_with_a_kill_and_its_export_scores_as_the_run_did(run: Run) -> None:
    script = EXAMPLES / "attached.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run)
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert "the run is done: the script ends here" in run.logs()
    load_back(run, script)
    run.check_replay()


@pytest.mark.parametrize("name", ["two_optimizers", *(pytest.param(one, marks=pytest.mark.faults) for one in MORE)])
def test_an_example_trains_and_its_export_scores_as_the_run_did(run: Run, name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    run.train(script, "--learners", "2", "--steps", "80", "--set", "sync_every=8").ended()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    load_back(run, script)
    run.check_replay()
