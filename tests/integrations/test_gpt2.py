"""GPT-2 from transformers, with a DataLoader of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.conftest import EXAMPLES, Run, check_loads_back
from transformers import GPT2Config, GPT2LMHeadModel

from atoll.learner.model import describe, load_weights, trained

pytestmark = pytest.mark.integrations

TINY = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}


def make_gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**TINY))


def test_tied_weights_are_one_tensor_of_the_plan_and_load_back_into_both_places(tmp_path: Path) -> None:
    model, file = make_gpt2(0), tmp_path / "model.safetensors"
    names = [tensor.name for tensor in describe(model)]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    save_file({name: parameter.data for name, parameter in trained(model).items()}, file)
    other = make_gpt2(1)
    load_weights(other, file)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert load_file(file).keys() == set(names)


@pytest.mark.faults
def test_the_example_trains_and_its_export_loads_back_to_the_runs_score(run: Run) -> None:
    run.train(EXAMPLES / "gpt2.py", "--learners", "2", "--steps", "40", "--set", "fragments=4").ended()
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    assert not run.events("same_batches", "unbalanced")
    check_loads_back(run, EXAMPLES / "gpt2.py")
