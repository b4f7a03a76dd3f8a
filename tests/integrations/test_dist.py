"""The wheel and the sdist as users get them. With torch, for every Python: `make dist PYTHONS=…`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]


def test_the_wheel_alone_simulates_and_serves_in_an_empty_environment(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs build, hatchling and twine (make integrations)")
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: tools/dist.py compares what it builds with what is committed")
    command = [sys.executable, str(ROOT / "tools" / "dist.py"), "--out", str(tmp_path), "--without-torch"]
    done = subprocess.run([*command, sys.executable], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert "alone: atoll simulate and atoll syncer work" in done.stdout
