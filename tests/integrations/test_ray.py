"""A short run on a Ray cluster of two nodes: watched, left alone, its controller killed, watched again and ended. Nodes
are lost in tests/system/test_ray.py (make faults)."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.test_same_script import ASKED, SCRIPT, by_train, fields
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.ray_cluster import RayCluster, find_actor, opened_cluster, until_no_process
from tests.system.test_two_at_once import start_both

pytest.importorskip("ray", reason="needs Ray (pip install 'atoll[ray]')")
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

LINE = (SCRIPTS / "line.py", "--on", "ray", "--set", "evaluate_every=0", "--set", "overlap=1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with opened_cluster(nodes=2) as cluster:
        yield cluster


def test_what_does_not_fit_is_refused_before_anything_starts(run: Run, cluster: RayCluster) -> None:
    refused = run.command("train", *LINE, "--learners", "2", "--gpus-per-learner", "2", "--out", run.out)
    assert refused.returncode == 2 and "4 GPUs are missing" in refused.stderr and refused.stderr.count("\n") == 1
    assert not run.out.exists()


@pytest.mark.faults
def test_the_same_script_gives_the_same_fields(run: Run, cluster: RayCluster, tmp_path: Path) -> None:
    """As test_same_script.py asks of the other engines."""
    here = tmp_path / "here"
    here.mkdir()
    usual = set(fields(by_train(Run(here))))
    run.train(SCRIPT, *ASKED, "--on", "ray").ended()
    assert set(fields(run.summary)) == usual
    assert run.summary["failure"] is None and sorted(run.summary["per_learner"]) == ["learner-0", "learner-1"]


@pytest.mark.faults
def test_of_two_controllers_that_start_at_once_one_is_refused(run: Run, cluster: RayCluster) -> None:
    words = ("train", *LINE, "--learners", "1", "--steps", "60", "--out", run.out)
    (_, _, _), (code, _, complaint) = start_both(run, words, words)
    assert code == 2 and "is alive on this cluster" in complaint and complaint.count("\n") == 1, complaint
    until_no_process(run.out, 30)
    assert run.summary["failure"] is None and run.ask("verify", run.out).returncode == 0


def test_a_run_goes_on_without_a_terminal_and_without_its_controller(run: Run, cluster: RayCluster) -> None:
    run.train(*LINE, "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    run.interrupt()  # without a terminal: detach
    assert "detached" in run.ended().stdout
    second = run.command("train", *LINE, "--learners", "2", "--out", run.out)
    assert second.returncode == 2 and "is alive on this cluster" in second.stderr

    os.kill(find_actor("Controller"), signal.SIGKILL)
    run.until_events(lambda events: any("controller was lost" in e["text"] for e in events))
    assert run.command("scale", run.out, "-1").returncode == 0
    run.until_events(lambda events: any(e["kind"] == "left" and e["learner"] == "learner-1" for e in events))
    assert members(run.events()) == {("learner-0", 1), ("learner-1", 1)}, "nobody noticed"

    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "atoll.cli", "train", "--on", "ray", "--resume", str(run.out)]
    again = subprocess.Popen(
        command, env=run.environment(), stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert again.stdout is not None and again.stderr is not None
    while "round" not in again.stdout.readline():
        assert again.poll() is None
    again.send_signal(signal.SIGINT)
    while (letter := again.stderr.read(1)) != ":":  # it asks
        assert letter
    os.write(keyboard, b"e\n")
    told, _ = again.communicate(timeout=120)
    assert again.returncode == 0, told
    until_no_process(run.out, 30)
    assert run.summary["failure"] is None and run.summary["restarts"] == 0
    assert run.ask("verify", run.out).returncode == 0
