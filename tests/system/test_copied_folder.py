"""The folder of a run with a bucket is copied, lost or taken over: only one syncer goes on, and the other says why."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Event, Run

from atoll.bucket.claims import newest_term
from atoll.bucket.client import open_bucket
from atoll.store.disk import DiskFailed

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore: make integrations"),
]


def count_rounds(events: list[Event]) -> int:
    return len([event for event in events if event["kind"] == "round"])


def copy_folder(folder: Path, to: Path) -> Path:
    subprocess.run(["cp", "-a", folder, to], check=True)
    return to


def refuse(run: Run, *words: str | Path) -> str:
    refused = run.command(*words)  # in this process its lock on the folder would stay
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    return refused.stderr


def verify(run: Run, url: str) -> None:
    verified = run.ask("verify", url)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout + verified.stderr


def start_stored(run: Run, url: str, pace: float = 0.02) -> subprocess.Popen[str]:
    """A syncer and its learner, until a cut is in the bucket. `pace`: seconds a step."""
    few = ("--set", "fragments=2", "--set", "sync_every=4", "--set", "cut_every=4")
    run.start("syncer", "--learners", "1", "--out", run.out, "--store", url, "--port", str(run.free_port()), *few)
    script = (SCRIPTS / "line.py", "--", "--pace", str(pace))
    learner = run.beside("learn", "--syncer", run.address(), "--name", "anna", *script)
    stored = run.folder / "bucket" / "cuts"
    run.until(lambda events: any(stored.glob("*/*/manifest.json")) and count_rounds(events) > 5)
    return learner


def test_of_a_folder_and_its_copy_one_goes_on(run: Run) -> None:
    url = f"file://{run.folder}/bucket"
    bucket, learner = open_bucket(url), start_stored(run, url)

    early, other = copy_folder(run.out, run.folder / "early"), str(run.free_port())
    told = refuse(run, "syncer", "--resume", early, "--port", other)
    assert f"{early} is a copy" in told and f"{run.out} on " in told, told
    assert f"atoll restore {url} DIR --take-over" in told
    assert "is a copy" in refuse(run, "syncer", "--standby", early, "--port", other)
    assert "is a copy" in refuse(run, "upload", early)
    rounds = count_rounds(run.events())
    run.until(lambda events: count_rounds(events) > rounds + 10)
    assert newest_term(bucket) == 1
    run.interrupt()
    run.ended()
    assert learner.wait(60) == 0

    # The run is released now, with rounds that the first copy does not hold.
    assert "holds an old copy" in refuse(run, "syncer", "--resume", early, "--port", other)
    again = Run(run.folder)
    again.out = copy_folder(run.out, run.folder / "again")
    again.start("syncer", "--resume", again.out, "--port", other)
    rounds = count_rounds(again.events())
    learner = again.beside("learn", SCRIPTS / "line.py", "--syncer", f"http://127.0.0.1:{other}", "--name", "anna")
    again.until(lambda events: count_rounds(events) > rounds + 5 and newest_term(bucket) == 2)
    told = refuse(run, "syncer", "--resume", run.out)
    assert f"this run went on elsewhere ({again.out}" in told, told
    verify(run, url)
    rounds = count_rounds(again.events())
    again.until(lambda events: count_rounds(events) > rounds + 5)
    again.interrupt()
    again.ended()
    assert learner.wait(60) == 0
    verify(run, url)


@pytest.mark.parametrize("loss", ["claim", pytest.param("folder", marks=pytest.mark.faults)])
def test_a_syncer_that_cannot_go_on_says_why_in_its_only_line(run: Run, loss: str) -> None:
    url = f"file://{run.folder}/bucket"
    learner = start_stored(run, url, pace=0.5)  # mostly nothing waits for the disk, and events are logged at once
    if loss == "claim":
        restored = run.ask("restore", url, run.folder / "again", "--take-over")
        assert restored.returncode == 0, restored.stderr
    else:
        shutil.rmtree(run.out)
    run.ended(code=DiskFailed.exit_code)
    reason = f"this run went on elsewhere: {url} has" if loss == "claim" else f"cannot read {run.out}"
    assert run.stderr.startswith(f"atoll: {reason}") and run.stderr.count("\n") == 1, run.stderr
    learner.kill()
    learner.wait()
