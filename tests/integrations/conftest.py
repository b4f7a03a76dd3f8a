"""The examples, also those with other libraries: no model is downloaded; runs start as in the system tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.containers import ROOT, Image
from tests.system.conftest import Run as Run
from tests.system.conftest import members
from tests.system.conftest import run as run

os.environ["HF_HUB_OFFLINE"] = "1"  # before a test imports transformers; the processes it starts inherit it

EXAMPLES = Path(__file__).parents[2] / "examples"


ENDLESS = ("--steps", "100000")
"""Of a run that `kill_and_see_back` ends."""


def kill_and_see_back(run: Run, learner: str = "learner-1", steps: int = 60) -> None:
    """Once it contributes it is killed, and contributes again, however long its second life takes to begin on this
    machine; only then is the run told to end, at `steps` or where it is beyond them."""
    run.until(lambda events: (learner, 1) in members(events))
    os.kill(run.pid(learner), signal.SIGKILL)
    run.until(lambda events: (learner, 2) in members(events))
    end_at(run, steps)
    assert run.summary["restarts"] >= 1


def end_at(run: Run, steps: int) -> None:
    ended = run.command("set", run.out, f"steps={steps}")
    assert ended.returncode == 0, ended.stderr
    run.ended()


def check_loads_back(run: Run, script: Path) -> None:
    """What is exported of a run has the run's last validation loss, as the script itself tells of a file."""
    file = run.folder / "exported.safetensors"
    exported = run.command("export", run.out, file)
    assert exported.returncode == 0, exported.stderr
    assert told_loss(run, script, file) == pytest.approx(run.summary["validation_loss_end"], rel=1e-4)


def told_loss(run: Run, script: Path, model: Path) -> float:
    """The validation loss of a saved model, as the script itself tells it."""
    command = [sys.executable, str(script), str(model)]
    told = subprocess.run(command, env=run.environment(), capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0, told.stderr
    return float(told.stdout.split()[-1])


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Of the Dockerfile, with the packages of this environment."""
    return Image.build(ROOT / "Dockerfile", tmp_path_factory.mktemp("image"), with_packages=False)
