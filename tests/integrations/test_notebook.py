"""A notebook's kernel joins a run of real processes, leaves it and joins again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import WAIT_S, Run, members

pytestmark = [pytest.mark.integrations, pytest.mark.system]
SCRIPT = Path(__file__).parent / "scripts" / "one_kernel.py"


def start_kernel(run: Run, name: str, *steps: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(SCRIPT), run.address(), name, *map(str, steps)]
    return subprocess.Popen(words, env=run.environment(), cwd=run.folder, stdout=subprocess.PIPE, text=True)


def test_one_kernel_joins_leaves_and_joins_again(run: Run) -> None:
    run.start("syncer", "--learners", "2", "--steps", "100000", "--set", "fragments=2", "--set", "sync_every=8",
              "--out", run.out)  # fmt: skip
    with start_kernel(run, "other", 0) as other, start_kernel(run, "notebook", 60, 0) as notebook:
        run.until(lambda events: ("notebook", 2) in members(events))
        ended = run.command("set", run.out, "steps=50")
        assert ended.returncode == 0, ended.stderr
        said, code = notebook.communicate(timeout=WAIT_S)[0], other.wait(WAIT_S)
    run.ended()
    assert (notebook.returncode, code) == (0, 0)
    first, second = said.splitlines()
    assert "has left, 60 steps" in first and "has left" in second
    assert {("notebook", 1), ("notebook", 2), ("other", 1)} <= members(run.events())
    assert run.command("verify", run.out).returncode == 0
