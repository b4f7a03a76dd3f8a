"""An export, as the command writes it, loads into the bare model without a word on its tensors."""

from __future__ import annotations

import runpy

import pytest
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, Run

pytestmark = pytest.mark.system


def test_an_export_is_the_whole_model_with_frozen_parameters_and_buffers(run: Run) -> None:
    script, short = SCRIPTS / "frozen.py", ("--steps", "60", "--set", "evaluate_every=0", "--set", "cut_every=4")
    run.train(script, "--learners", "2", *short, "--set", "sync_every=6").ended()
    done = run.ask("export", run.out, "whole.safetensors")
    assert done.returncode == 0 and "note: frozen parameters and local buffers are those of" in done.stdout, done
    model, held = runpy.run_path(str(script))["model"], load_file(run.folder / "whole.safetensors")
    model.load_state_dict(held)  # strict
    assert held["seen"] > 0 and held["norm.num_batches_tracked"] > 0, "of the last cut"

    done = run.ask("export", run.out, "merged.safetensors", "--merged")
    names = "'base.bias', 'base.weight', 'norm.num_batches_tracked', 'seen'"
    assert done.returncode == 0 and f"note: left out: {names}" in done.stdout, done
    assert held.keys() - load_file(run.folder / "merged.safetensors").keys() == {
        n.strip("'") for n in names.split(", ")
    }

    # A syncer's machine has no learner's folder: what the first learner told when it joined is in the journal.
    for kept in run.out.glob("learners/*/unmerged.safetensors"):
        kept.unlink()
    done = run.ask("export", run.out, "elsewhere.safetensors")
    assert done.returncode == 0 and f"note: left out: {names}, which are not merged." in done.stdout, done
