"""LoRA with peft: adapters are merged, the frozen base model is exported with them."""

from __future__ import annotations

import pytest
from safetensors import safe_open
from tests.integrations.conftest import EXAMPLES
from tests.integrations.test_examples import kill_one, load_back
from tests.system.conftest import Run

pytestmark = pytest.mark.integrations


def test_lora_trains_in_a_run_with_a_kill_and_its_export_scores_as_the_run_did(run: Run) -> None:
    script = EXAMPLES / "lora.py"
    assert len(script.read_text().splitlines()) <= 60
    run.train(script, "--learners", "2", "--steps", "60", "--set", "sync_every=8")
    kill_one(run)
    assert run.summary["validation_loss_end"] < run.summary["validation_loss_start"]
    with safe_open(run.out / "model.safetensors", framework="numpy") as adapters:
        assert all("lora_" in name for name in adapters.keys())  # noqa: SIM118
    load_back(run, script)
