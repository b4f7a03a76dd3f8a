"""JAX learners in runs of real processes: by themselves, and beside a learner of torch's, with a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.conftest import ENDLESS, EXAMPLES, Run, check_loads_back, kill_and_see_back, told_loss
from tests.system.conftest import members

pytestmark = [pytest.mark.integrations, pytest.mark.system, pytest.mark.timeout(1200)]
SCRIPTS = Path(__file__).parent / "scripts"
BESIDE_TORCH, DONATING = SCRIPTS / "jax_or_torch.py", SCRIPTS / "jax_step.py"


def test_a_jitted_step_that_donates_both_trees_trains_in_a_run_with_a_kill(run: Run) -> None:
    run.train(DONATING, "--learners", "2", *ENDLESS, "--set", "sync_every=8", "--set", "cut_every=20")
    run.until(lambda events: any(e["kind"] == "cut" and len(e.get("learners", ())) == 2 for e in events))
    kill_and_see_back(run, steps=300)
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
    assert run.logs().count("compiled its step 1 times") == 2, "adoptions do not compile it again"
    assert "goes on with the inner optimizer" in run.logs()
    assert run.command("verify", run.out).returncode == 0
    check_loads_back(run, DONATING)


def test_two_learners_one_killed_train_a_model_that_loads_back_to_the_runs_score(run: Run) -> None:
    script = EXAMPLES / "jax_optax.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    kill_and_see_back(run, steps=300)
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
    check_loads_back(run, script)


def test_a_learner_of_torchs_and_one_of_jaxs_train_one_model(run: Run) -> None:
    twin = EXAMPLES / "jax_torch_twin.py"
    assert len(twin.read_text().splitlines()) <= 40
    run.train(BESIDE_TORCH, "--learners", "2", *ENDLESS, "--set", "sync_every=8")
    run.until(lambda events: {"learner-0", "learner-1"} <= dict(members(events)).keys())
    kill_and_see_back(run, steps=300)
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
    assert "its own inner optimizer, which warms up: the peer's is torch's" in run.logs() and not run.events("refused")
    assert run.command("verify", run.out).returncode == 0
    assert "compiled its step 1 times" in run.logs(), "adoptions do not compile it again"
    check_loads_back(run, twin)
    exported = run.folder / "exported.safetensors"
    in_jax = told_loss(run, EXAMPLES / "jax_optax.py", exported)
    assert in_jax == pytest.approx(run.summary["validation_loss_end"], rel=1e-4)
