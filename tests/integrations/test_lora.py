"""LoRA with peft: adapters are merged, the frozen base model is exported with them."""

from __future__ import annotations

import pytest
from safetensors import safe_open
from tests.integrations.conftest import ENDLESS, EXAMPLES, Run, kill_and_see_back
from tests.integrations.test_examples import load_back

pytestmark = [pytest.mark.integrations, pytest.mark.faults]


def test_lora_trains_in_a_run_with_a_kill_and_its_export_scores_as_the_run_did(run: Run) -> None:
    script = EXAMPLES / "lora.py"
    assert len(script.read_text().splitlines()) <= 60
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run)
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    with safe_open(run.out / "model.safetensors", framework="numpy") as adapters:
        assert all("lora_" in name for name in adapters.keys())  # noqa: SIM118
    load_back(run, script)
