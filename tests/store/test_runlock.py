"""A run that somebody has in hand is refused by name, and nothing of it is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire, check_not_alive, hold_run, syncer_holding

HOLDER = """
import pathlib, sys
from atoll.store.writer_lease import hold_run
with hold_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """That has the run in hand."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    run.settings.write_text("seed = 7\n")
    run.events.write_text("{}\n")
    run.log("syncer").write_text("a log\n")
    return run


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_who_has_a_run_in_hand_is_named_and_the_run_is_left_alone(run: RunDir) -> None:
    with another_process(run.path) as other:
        before = everything(run.path)
        for ask in (lambda: RunDir.create(run.path, force=True), lambda: check_not_alive(run.path)):
            with pytest.raises(ConfigError) as error:
                ask()
            assert f"run {run.path} is alive, pid {other.pid}: " in str(error.value)
            assert "\n" not in str(error.value)
        with pytest.raises(ConfigError, match="is alive"), hold_run(run.path):
            pass
        assert everything(run.path) == before


def test_a_run_whose_holder_is_gone_may_be_replaced(run: RunDir) -> None:
    with another_process(run.path) as other:
        other.kill()
        other.wait()
    check_not_alive(run.path)
    RunDir.create(run.path, force=True)
    assert not run.events.exists()


def test_a_syncer_without_a_supervisor_keeps_its_run_alive(run: RunDir) -> None:
    reign = acquire(run.journal)
    before = everything(run.path)
    with pytest.raises(ConfigError, match=f"is alive, pid {os.getpid()}, term 1: "):
        check_not_alive(run.path)
    assert everything(run.path) == before, "not even a lock is made by asking"
    with pytest.raises(ConfigError, match=f"is alive, pid {os.getpid()}, term 1: "):
        RunDir.create(run.path, force=True)
    assert everything(run.path) == before
    reign.release()
    check_not_alive(run.path)
    RunDir.create(run.path, force=True)
    assert not run.journal.exists()


def test_a_folder_in_which_nobody_ever_served_has_no_holder(tmp_path: Path) -> None:
    assert syncer_holding(tmp_path / "journal") == ""
    assert list(tmp_path.iterdir()) == []


def test_one_after_another_may_have_it(run: RunDir) -> None:
    for _ in range(2):
        with hold_run(run.path):
            assert (run.path / "run.lock").read_text() == f"{os.getpid()}\n"
