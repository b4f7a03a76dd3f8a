"""The files of examples/deploy/slurm on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S
from tests.system.slurm import LocalSlurm

pytestmark = [
    pytest.mark.system,
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LocalSlurm.possible(), reason="needs root, slurmctld, slurmd and munged"),
]
FILES = Path(__file__).parents[2] / "examples" / "deploy" / "slurm"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    found = LocalSlurm(folder)
    yield found
    found.close()


class Cluster:
    def __init__(self, slurm: LocalSlurm, folder: Path) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "runs" / "first"
        # As a user's shell has it: `atoll` and `python` are those of the environment that is active.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._shell = {"ATOLL_RUN": "runs/first", "ATOLL_ADVERTISE": "127.0.0.1", "ATOLL_PORT": "0", "PATH": path}
        folder.mkdir()

    def start(self, learners: int, steps: int, script: Path = SCRIPTS / "plain.py") -> tuple[str, str]:
        asked = ("--learners", str(learners), "--steps", str(steps), "--set", "fragments=4", "--set", "sync_every=8")
        words = ("--partition=urgent", "--cpus-per-task=1", str(FILES / "syncer.sbatch"), *asked)
        syncer = self.slurm.submit(self.folder, *words, **self._shell)
        words = (f"--array=0-{learners - 1}", str(FILES / "learners.sbatch"), str(script))
        return syncer, self.slurm.submit(self.folder, *words, **self._shell)

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{self.slurm.ask('squeue')}\n{logs}"
            time.sleep(0.2)

    def check_end(self, jobs: tuple[str, str]) -> dict[str, Any]:
        """All jobs have ended, nothing is lost."""
        self.until(lambda: not any(self.slurm.states(job) for job in jobs))
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        tokens = summary["tokens"]
        assert tokens["lost"] == tokens["in_flight"] == 0
        command = [sys.executable, "-m", "atoll.cli", "verify", str(self.run)]
        assert subprocess.run(command, capture_output=True, timeout=WAIT_S).returncode == 0
        assert not (self.folder / "runs" / "first-link").exists(), "a secret that is of no use any more"
        return summary


def test_an_array_of_learners_trains_beside_the_syncers_job(slurm: LocalSlurm, tmp_path: Path) -> None:
    cluster = Cluster(slurm, tmp_path / "work")
    (cluster.folder / "gate").touch()  # short steps
    summary = cluster.check_end(cluster.start(2, 100))
    assert set(summary["per_learner"]) == {"learner-0", "learner-1"}


def test_a_task_that_is_preempted_leaves_in_good_order_and_comes_back(slurm: LocalSlurm, tmp_path: Path) -> None:
    cluster = Cluster(slurm, tmp_path / "work")
    jobs = cluster.start(3, 600)
    cluster.until(lambda: len(cluster.events("round")) > 12)
    urgent = slurm.submit(cluster.folder, "--partition=urgent", "--ntasks=1", "--wrap=sleep 5", "--output=/dev/null")
    cluster.until(lambda: bool(cluster.events("left")))
    left = cluster.events("left")[0]["learner"]
    assert left in {event["learner"] for event in cluster.events("leaving")}, "it gave its last steps"
    cluster.until(lambda: not slurm.states(urgent))
    # Slurm lets a task that was queued again wait for two minutes.
    came = len(cluster.events("round"))
    cluster.until(lambda: any(event["learner"] == left for event in cluster.events("joined")[3:]))
    assert len(cluster.events("round")) > came, "the others went on"
    (cluster.folder / "gate").touch()
    cluster.check_end(jobs)
