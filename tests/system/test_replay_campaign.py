"""Runs of the built-in workload beside something else that takes a core, with and without a killed learner: each of
them is repeated bit for bit from its tape.

The built-in workload's learning rate follows the run's progress, so a step that goes by another round than its tape
says shows in the bits of everything after it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tomli_w
from tests.system.conftest import Run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

TINY = {"depth": 1, "block": 32, "batch": 4}
LEAST_STEP_S = {False: 0.0, True: 0.1}
"""Without a kill as fast as it goes; with one most of it is sleep: the killed learner is back before the end."""
SEEDS = 20


@contextmanager
def busy_core() -> Iterator[None]:
    """Something else that never rests: whoever trains is interrupted anywhere in a step."""
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        burner.kill()
        burner.wait()


def train_and_replay(run: Run, seed: int, steps: int, *, killed: bool) -> None:
    learners = 3 + seed % 4 // 2
    settings = run.folder / "settings.toml"
    settings.write_text(tomli_w.dumps({"workload": {**TINY, "pace_s": LEAST_STEP_S[killed]}}))
    victim = f"learner-{seed % learners}@{0.05 + seed % 5 / 20:.2f}"
    kill = ("--kill", victim) if killed else ()
    shape = ("--learners", str(learners), "--steps", str(steps), "--seed", str(seed), "--set", "evaluate_every=0")
    with busy_core():
        run.train("--config", settings, *shape, *kill).ended()
    assert len(run.events("killed")) == killed
    found = run.check_replay()
    back = any(event["incarnation"] > 1 for event in run.events("recovered"))
    print(f"seed {seed}: {learners} learners, {found['compared']} versions the same, killed {killed}, back {back}")


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
def test_two_runs_beside_a_busy_core_are_repeated_bit_for_bit(run: Run, seed: int) -> None:
    train_and_replay(run, seed, steps=120, killed=seed == 1)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_beside_a_busy_core_is_repeated_bit_for_bit(run: Run, seed: int) -> None:
    train_and_replay(run, seed, steps=300, killed=seed % 2 == 1)


@pytest.mark.faults
def test_the_demo_is_repeated_bit_for_bit(run: Run) -> None:
    """What `make run` does."""
    run.train("--demo").ended()
    assert len(run.events("killed")) == 1
    run.check_replay()
