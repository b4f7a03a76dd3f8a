"""Syncer, courier and every command start without torch: `pip install atoll` brings none, and where there is one it
costs seconds and more than 100 MB in every process."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import iter_modules

import atoll.cli

MODULES = (
    "atoll",
    *(f"atoll.cli.{one.name}" for one in iter_modules(atoll.cli.__path__) if one.name != "__main__"),
    "atoll.courier.service",
    "atoll.launch.local",
    "atoll.observe.dashboard",
    "atoll.observe.plots.html",
    "atoll.observe.plots.png",
    "atoll.observe.screen",
    "atoll.relay.process",
    "atoll.syncer.service",
)
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, 'torch' in sys.modules)
"""


def test_starts_without_torch() -> None:
    """One process imports them all: the first that brings torch is named."""
    probe = subprocess.run([sys.executable, "-c", PROBE, *MODULES], capture_output=True, text=True, timeout=60)
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.splitlines() == [f"{name} False" for name in MODULES]
