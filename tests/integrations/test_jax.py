"""JAX learners in runs of real processes: by themselves, and beside a learner of torch's, with a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.integrations.conftest import EXAMPLES, Run, check_loads_back, told_loss
from tests.system.conftest import members

pytestmark = [pytest.mark.integrations, pytest.mark.system, pytest.mark.timeout(1200)]
BESIDE_TORCH = Path(__file__).parent / "scripts" / "jax_or_torch.py"


def kill_and_see_back(run: Run, learner: str) -> None:
    """However long its second life takes to begin on this machine: the run ends once that has contributed."""
    lives = {life for name, life in members(run.events()) if name == learner}
    os.kill(run.pid(learner), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "joined" and e["incarnation"] > max(lives) for e in events))
    run.until(lambda events: any(name == learner and life > max(lives) for name, life in members(events)))
    ended = run.command("set", run.out, "steps=300")
    assert ended.returncode == 0, ended.stderr
    run.ended()


def test_two_learners_one_killed_train_a_model_that_loads_back_to_the_runs_score(run: Run) -> None:
    script = EXAMPLES / "jax_optax.py"
    assert len(script.read_text().splitlines()) <= 40
    run.train(script, "--learners", "2", "--steps", "100000", "--set", "sync_every=8", "--set", "cut_every=20")
    run.until(lambda events: any(event["kind"] == "cut" for event in events) and "learner-1" in dict(members(events)))
    kill_and_see_back(run, "learner-1")
    assert run.summary["restarts"] >= 1
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
    assert "goes on with the inner optimizer" in run.logs()
    assert run.command("verify", run.out).returncode == 0
    check_loads_back(run, script)


def test_a_learner_of_torchs_and_one_of_jaxs_train_one_model(run: Run) -> None:
    run.train(BESIDE_TORCH, "--learners", "2", "--steps", "100000", "--set", "sync_every=8")
    run.until(lambda events: any(event["kind"] == "joined" and event["learner"] == "learner-1" for event in events))
    run.until(lambda events: {"learner-0", "learner-1"} <= {name for name, _ in members(events)})
    kill_and_see_back(run, "learner-1")
    assert run.summary["validation_loss_end"] < 0.5 * run.summary["validation_loss_start"]
    assert "its own inner optimizer, which warms up: the peer's is torch's" in run.logs() and not run.events("refused")
    assert run.command("verify", run.out).returncode == 0
    assert "compiled its step 1 times" in run.logs(), "adoptions do not compile it again"
    check_loads_back(run, EXAMPLES / "jax_torch_twin.py")
    exported = run.folder / "exported.safetensors"
    in_jax = told_loss(run, EXAMPLES / "jax_optax.py", exported)
    assert in_jax == pytest.approx(run.summary["validation_loss_end"], rel=1e-4)
