"""The same line pasted in two terminals: one learner each where no name is given, one that is refused where it is."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run

from atoll.learner.folder import default_names
from atoll.store.verify import verify_run

pytestmark = pytest.mark.system
TOKENS = 16
"""Of a step of the script."""


def rounds(run: Run) -> int:
    return len(run.events("round"))


def paste(run: Run, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The same line once more, in a terminal that is in another folder."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "atoll.cli", "learn", str(SCRIPTS / "line.py"), *words]
    env = run.environment()
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=120, check=False)


def start(run: Run, *words: str) -> tuple[str, list[subprocess.Popen[str]]]:
    """A syncer, and two learners by the very same line, which names none of them."""
    run.start("syncer", "--learners", "2", "--out", run.out, "--port", str(run.free_port()), *words)
    url = run.address()
    learners = [run.beside("learn", SCRIPTS / "line.py", "--syncer", url) for _ in range(2)]
    run.until(lambda events: any(len(e["members"]) == 2 for e in events if e["kind"] == "round"))
    return url, learners


def end(run: Run, learners: list[subprocess.Popen[str]]) -> None:
    """Nobody joined but the two, once each; every figure is of what they did, and verify agrees with the ledger."""
    run.interrupt()
    run.ended()
    assert [learner.wait(60) for learner in learners] == [0, 0], (run.folder / "beside.log").read_text()
    names = list(islice(default_names(), 2))
    assert sorted(e["learner"] for e in run.events("joined")) == names
    assert not run.events("unbalanced") and not run.events("lost")
    summary, report = run.summary, verify_run(run.out)
    assert report.ok, report.problem
    assert report.facts["tokens"] == {name: summary["tokens"][name] for name in report.facts["tokens"]}
    steps = {name: told["steps"] for name, told in summary["per_learner"].items()}
    (finished,) = run.events("finished")
    assert steps == {told["learner"]: told["t"] for told in finished["learners"]}
    assert summary["tokens"]["computed"] == TOKENS * sum(steps.values())


@pytest.mark.faults
def test_the_same_line_in_two_terminals_is_two_learners_or_one_that_is_told(run: Run) -> None:
    url, learners = start(run)
    name = next(default_names())
    before = rounds(run)
    second = paste(run, run.folder / "elsewhere", "--syncer", url, "--name", name)  # the syncer decides
    assert second.returncode == 2
    line = second.stderr.strip().splitlines()[-1]
    assert line.startswith(f"atoll: {name} is here already, from {socket.gethostname()}, pid ")
    assert line.endswith(": choose another --name (ATOLL_LEARNER)")
    assert "Traceback" not in second.stderr
    assert rounds(run) > before, "the run commits as before"
    second = paste(run, run.folder, "--syncer", url, "--name", name)  # the folder's lock decides
    assert second.returncode == 2 and f"atoll: {name} is here already" in second.stderr
    end(run, learners)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_minute_of_a_second_terminal_that_tries_again_and_again(run: Run) -> None:
    url, learners = start(run)
    name, until, counts = next(default_names()), time.monotonic() + 60.0, [rounds(run)]
    while time.monotonic() < until:
        assert paste(run, run.folder / "elsewhere", "--syncer", url, "--name", name).returncode == 2
        counts.append(rounds(run))
    assert all(later > earlier for earlier, later in pairwise(counts)), counts
    end(run, learners)


@pytest.mark.faults
def test_a_killed_learner_that_is_started_again_has_its_name_at_once(run: Run) -> None:
    """Its courier may be there for a moment longer, and answers pings: the folder proves the succession."""
    url, learners = start(run)
    name = next(default_names())
    first = next(one for one in learners if f"{one.pid} {name} " in lock_of(run, url, name))
    learners.remove(first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    learners.append(run.beside("learn", SCRIPTS / "line.py", "--syncer", url))
    run.until(lambda events: (name, 2) in {(e["learner"], e["incarnation"]) for e in events if e["kind"] == "joined"})
    assert not run.events("turned_away")
    run.interrupt()
    run.ended()
    assert [learner.wait(60) for learner in learners] == [0, 0]
    assert verify_run(run.out).ok


def lock_of(run: Run, url: str, name: str) -> str:
    lock, *_ = run.folder.glob(f"atoll-learners/*/{name}/lock")
    return lock.read_text()
