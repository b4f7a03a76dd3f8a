"""Two commands that start, or go on with, the same run at the same moment: one has it, the other says so in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import WAIT_S, Run, heed_interrupts
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3
from tests.system.test_stores import FEW

from atoll.bucket.claims import newest_term, read_claim
from atoll.bucket.client import open_bucket

pytestmark = [pytest.mark.system, pytest.mark.faults]
with_bucket = pytest.mark.skipif(not possible(), reason="needs obstore and moto: make integrations")

URL = f"s3://{BUCKET}/run"
SHAPE = ("--learners", "1", "--set", "evaluate_every=0", *FEW, "--steps", "20")


def start_both(run: Run, *commands: tuple[str | Path, ...]) -> list[tuple[int, str, str]]:
    """All at once, to their ends: exit code, what was printed, and the complaint; the winner first."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *map(str, words)],
            cwd=run.folder,
            env=run.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        )
        for words in commands
    ]
    said = [process.communicate(timeout=WAIT_S) for process in started]
    ends = [(process.returncode, *words) for process, words in zip(started, said, strict=True)]
    assert sorted(code for code, _, _ in ends)[0] == 0, ends
    return sorted(ends, key=lambda one: one[0])


def check_run(run: Run, out: Path) -> None:
    run.out = out
    assert run.summary["failure"] is None
    verified = run.command("verify", out)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout + verified.stderr


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_of_two_in_one_folder_one_is_refused(run: Run, more: tuple[str, ...]) -> None:
    words = ("train", "--out", run.out, *SHAPE, *more)
    (_, _, _), (code, _, complaint) = start_both(run, words, words)
    assert code == 2 and complaint.count("\n") == 1, complaint
    assert "is alive, pid" in complaint or "already holds a run" in complaint
    check_run(run, run.out)


@with_bucket
def test_of_two_in_one_folder_with_a_bucket_one_is_refused(run: Run, s3: LocalS3) -> None:
    words = ("train", "--out", run.out, *SHAPE, "--store", URL)
    (_, _, _), (code, _, complaint) = start_both(run, words, words)
    assert code == 2 and complaint.count("\n") == 1, complaint
    check_run(run, run.out)


@with_bucket
def test_of_two_in_two_folders_with_one_bucket_one_has_it(run: Run, s3: LocalS3) -> None:
    folders = [run.folder / "one", run.folder / "other"]
    first, second = [("train", "--out", folder, *SHAPE, "--store", URL) for folder in folders]
    (_, _, _), (code, _, complaint) = start_both(run, first, second)
    assert code != 0 and complaint.count("\n") == 1 and URL in complaint, complaint
    bucket = open_bucket(URL)
    assert newest_term(bucket) == 1
    winner = Path(read_claim(bucket, 1).folder)
    assert winner in folders
    check_run(run, winner)


@with_bucket
def test_of_two_that_go_on_from_one_bucket_one_has_it(run: Run, s3: LocalS3) -> None:
    run.train(*SHAPE, "--store", URL, replayed=False).ended()
    folders = [run.folder / "one", run.folder / "other"]
    first, second = [("train", "--resume", folder, "--store", URL, "--steps", "30") for folder in folders]
    (_, _, _), (code, _, complaint) = start_both(run, first, second)
    assert code == 2 and complaint.count("\n") == 1, complaint
    assert "a moment sooner" in complaint or "has not released it" in complaint
    bucket = open_bucket(URL)
    check_run(run, Path(read_claim(bucket, newest_term(bucket)).folder))
