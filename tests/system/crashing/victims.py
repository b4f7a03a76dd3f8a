"""The living processes of a run by name, and their sudden end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.system.conftest import Run

_MODULES = {"syncer": b"atoll.syncer", "learner": b"atoll.launch.script", "courier": b"atoll.courier"}


def pids(run: Run, name: str) -> list[int]:
    """Of `syncer`, `learner-1`, or `courier-1`, the one beside learner-1; usually one, none while it is dead."""
    kind, _, number = name.partition("-")
    owner = f"ATOLL_LEARNER=learner-{number}".encode()
    return [
        pid
        for pid in run.processes()
        if _MODULES[kind] in _words(pid, "cmdline") and (not number or owner in _words(pid, "environ"))
    ]


def kill(run: Run, *names: str) -> bool:
    """SIGKILL to all of them at once; whether any was there."""
    found = [pid for name in names for pid in pids(run, name)]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _words(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []
