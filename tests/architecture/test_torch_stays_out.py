"""Syncer, courier and command line start without torch: it costs seconds and more than 100 MB in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = "import importlib, sys; importlib.import_module(sys.argv[1]); print('torch' in sys.modules)"


@pytest.mark.parametrize(
    "module",
    [
        "atoll",
        "atoll.cli",
        "atoll.courier.service",
        "atoll.launch.local",
        "atoll.observe.dashboard",
        "atoll.observe.screen",
        "atoll.syncer.service",
    ],
)
def test_starts_without_torch(module: str) -> None:
    probe = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, timeout=60)
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.strip() == "False", f"importing {module} imports torch"
