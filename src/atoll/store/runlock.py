"""Whether a run is alive: asked before anything in its folder is replaced, removed or gone on with.

    run.lock        flock'ed by whoever has the whole run in hand (`atoll train`, a tape, a baseline), with its pid
    journal/lock    flock'ed by the syncer that serves the run (writer_lease.py)

A run is alive while one of the two is held: a supervisor may be between two syncers, and a syncer may have no
supervisor, or outlive it. Both are free as soon as their process is gone. run.lock itself is never removed: whoever
waits for the name of a removed file would hold another lock than the next one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import mode_in
from atoll.store.disk import not_written
from atoll.store.writer_lease import is_locked, syncer_holding

NAME = "run.lock"


@contextmanager
def hold_run(path: Path) -> Iterator[None]:
    """Have the whole run in hand; ConfigError, with nothing touched, while somebody else has it."""
    check_not_alive(path)
    descriptor = _lock(path / NAME)
    if descriptor is None:  # somebody was faster
        raise _alive(path, f"pid {_pid(path / NAME)}")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_alive(path: Path) -> bool:
    """Whether a supervisor or a syncer on this machine has this run; nothing is made or changed by asking."""
    return is_locked(path / NAME) or bool(syncer_holding(path / "journal"))


def check_not_alive(path: Path) -> None:
    """ConfigError while a supervisor or a syncer has this run; nothing is made or changed by asking."""
    if is_locked(path / NAME):
        raise _alive(path, f"pid {_pid(path / NAME)}")
    if holder := syncer_holding(path / "journal"):
        raise _alive(path, holder)


def _alive(path: Path, who: str) -> ConfigError:
    return ConfigError(f"run {path} is alive, {who}: end it first, or use another folder; nothing of it was touched")


def _lock(path: Path) -> int | None:
    """An open descriptor that holds the lock; None if another has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode_in(path.parent))
    except OSError as error:
        raise not_written(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise not_written(error, path) from error
    return descriptor


def _pid(path: Path) -> str:
    """Of whoever holds the lock, as far as it can be read."""
    try:
        return path.read_text().strip() or "unknown"
    except OSError:
        return "unknown"
