"""A notebook's kernel joins a run of real processes, leaves it and joins again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.conftest import Run, end_at
from tests.system.conftest import WAIT_S, members

pytest.importorskip("ipykernel", reason="needs ipykernel and jupyter_client (make integrations)")
pytestmark = [pytest.mark.integrations, pytest.mark.system]
SCRIPT = Path(__file__).parent / "scripts" / "one_kernel.py"


def start_kernel(run: Run, name: str, *steps: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(SCRIPT), run.address(), name, *map(str, steps)]
    return subprocess.Popen(words, env=run.environment(), cwd=run.folder, stdout=subprocess.PIPE, text=True)


def test_one_kernel_joins_leaves_and_joins_again_and_its_cells_show_how_far_it_is(run: Run) -> None:
    run.start("syncer", "--learners", "2", "--steps", "100000", "--set", "fragments=2", "--set", "sync_every=8",
              "--out", run.out)  # fmt: skip
    with start_kernel(run, "other", 0) as other, start_kernel(run, "notebook", 60, -60) as notebook:
        said = notebook.communicate(timeout=WAIT_S)[0]
        end_at(run, 50)
        lines, code = other.communicate(timeout=WAIT_S)[0].splitlines(), other.wait(WAIT_S)
    assert (notebook.returncode, code) == (0, 0)
    assert {("notebook", 1), ("notebook", 2), ("other", 1)} <= members(run.events())
    gone = [event["reason"] for event in run.events("left", "lost") if event["learner"] == "notebook"]
    assert gone[-1] == "it left before the run ended", "its kernel was shut down, with an error of an earlier cell"
    asked = re.findall(r"^execute_result: <atoll.Learner notebook, .*: training, 60 steps, \d+% of", said, re.MULTILINE)
    assert len(asked) == 2
    assert re.search(r"^display_data: notebook: training, 0 steps, \d+% of the run$", said, re.MULTILINE)
    shown = [line for line in lines if line.startswith("update_display_data: other: ")]
    assert re.search(r"training, [\d,]+ steps, \d+% of the run, loss [\d.e-]+$", shown[0])
    assert re.search(r"has left, [\d,]+ steps, \d+% of the run, loss [\d.e-]+$", shown[-1])
