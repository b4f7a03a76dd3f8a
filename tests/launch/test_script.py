from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from atoll.launch.local import RUNNER


def run(tmp_path: Path, code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    command = [sys.executable, *RUNNER, str(tmp_path / "mine.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_a_script_runs_as_if_it_were_started_by_itself(tmp_path: Path) -> None:
    code = "import sys, beside\nprint(__name__, sys.argv[1:], beside.word, __file__)\nsys.exit(7)"
    done = run(tmp_path, code, "--a", "b")
    assert done.returncode == 7
    assert done.stdout.strip() == f"__main__ ['--a', 'b'] beside {tmp_path / 'mine.py'}"


def test_a_mistake_that_atoll_can_name_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "from atoll.protocol.errors import PlanError\nraise PlanError('the model has no blocks')")
    assert (done.returncode, done.stderr) == (2, "atoll: the model has no blocks\n")


def test_a_script_that_says_why_it_ends_is_not_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys\nsys.exit('no data')")
    assert (done.returncode, done.stderr) == (2, "no data\n")


def test_any_other_error_keeps_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ValueError('mine')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: mine")


def test_it_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    """Here the supervisor is a process that never was our parent."""
    done = run(tmp_path, "import time\ntime.sleep(30)", ATOLL_SUPERVISOR="1")
    assert done.returncode == -15
