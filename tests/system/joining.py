"""What runs with keys have in common: a folder of keys, and the link that their syncer hands out."""

from __future__ import annotations

import time
from pathlib import Path

from tests.system.conftest import WAIT_S, Run


def make_keys(run: Run) -> Path:
    keys = run.folder / "keys"
    made = run.ask("cert", "--out", keys)
    assert made.returncode == 0, made.stderr
    return keys


def link_of(run: Run, keys: Path) -> str:
    """Of the first token, once the syncer listens."""
    run.address()
    deadline = time.monotonic() + WAIT_S
    while not (keys / "last.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return run.ask("tokens", "--keys", keys, "link").stdout.strip()
