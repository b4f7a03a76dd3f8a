"""Going on with a folder that somebody else may have made: nothing of it runs unasked, and damage is told."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Run

from atoll.launch.begun_here import check_begun_here
from atoll.store.rundir import RunDir

pytestmark = pytest.mark.system

FEW = ("--set", "fragments=2", "--set", "sync_every=4", "--set", "cut_every=4", "--set", "evaluate_every=0")

MORE = "100000"


def ask_at_terminal(run: Run, answer: str) -> tuple[int, str]:
    """Exit code and output of a resume at a terminal, where this is typed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "atoll.cli", "train", "--resume", str(run.out), "--steps", MORE]
    with subprocess.Popen(
        command, cwd=run.folder, env=run.environment(), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        with suppress(OSError):  # EIO: the command has ended, and all that it wrote is read
            while part := os.read(ours, 4096):
                seen += part
        code = process.wait(WAIT_S)
        os.close(ours)
    return code, seen.decode()


def test_a_run_from_elsewhere_runs_nothing_unasked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(SCRIPTS / "line.py", "--learners", "1", "--steps", "40", *FEW, replayed=False).ended()
    resume, events = ("train", "--resume", run.out, "--steps", MORE), (run.out / "events.jsonl").read_bytes()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    refused = run.ask(*resume)
    assert refused.returncode == 2 and "did not begin here" in refused.stderr
    assert f"runs {SCRIPTS / 'line.py'} in {run.folder}" in refused.stderr and "--trust" in refused.stderr
    refused = run.ask("replay", run.out)
    assert refused.returncode == 2 and f"to replay it runs {SCRIPTS / 'line.py'}" in refused.stderr, refused.stderr
    code, shown = ask_at_terminal(run, "n")
    assert code == 2 and "Go on?" in shown and "is left as it is" in shown.replace("\r\n", "")
    assert (run.out / "events.jsonl").read_bytes() == events, "nothing was started"

    # Where it began it is known, unless somebody wrote another script into it.
    monkeypatch.undo()
    settings = (run.out / "run.toml").read_text()
    (run.out / "run.toml").write_text(settings.replace("line.py", "drift.py"))
    assert "drift.py" in run.ask(*resume).stderr
    (run.out / "run.toml").write_text(settings)

    # What a run writes to line by line is written through no link.
    (run.out / "logs").rename(run.out / "other")
    (run.out / "logs").symlink_to(run.out / "other")
    assert f"{run.out / 'logs'} is a link" in run.ask(*resume).stderr
    (run.out / "logs").unlink()
    (run.out / "other").rename(run.out / "logs")
    (run.out / "events.jsonl").rename(run.out / "kept")
    (run.out / "events.jsonl").symlink_to(run.out / "kept")
    assert f"{run.out / 'events.jsonl'} is a link" in run.ask(*resume).stderr
    (run.out / "kept").replace(run.out / "events.jsonl")

    # A snapshot that is damaged is named, with what is used in its place.
    before, newest = sorted(path for path in (run.out / "cuts").iterdir() if (path / "manifest.json").exists())[-2:]
    (newest / "syncer.json").write_text("{")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    run.start(*resume, "--trust")
    rounds = len(run.events("round"))
    run.until(lambda events: len(run.events("round")) > rounds)
    run.interrupt()
    run.ended()
    told = f"snapshot {int(newest.name)} cannot be used"
    assert told in run.stdout and f"snapshot {int(before.name)} is used instead" in run.stdout
    check_begun_here(RunDir(run.out), trusted=False)  # it is known from now on
