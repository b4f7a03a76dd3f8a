"""Figures of runs that were gone on with, forked, restored or taken over: summary, report, status, screen and the
journal say the same. A sample of it, a restored run, is in test_lost_disk.py."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.accounts import check_figures, check_live_figures
from tests.system.conftest import SCRIPTS, Run

from atoll.observe.report import read_run
from atoll.store.head import read_head
from atoll.store.rundir import RunDir

pytestmark = [
    pytest.mark.system,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore: make integrations"),
]

TOKENS_A_STEP = 16
"""Of line.py."""
SLOW = ("--", "--pace", "0.2")
"""Of line.py: between two rounds there is time to ask."""
FEW = ("--set", "fragments=2", "--set", "sync_every=4", "--set", "cut_every=6", "--set", "evaluate_every=0")


def committed(run: Run) -> int:
    return max((event["round"] + 1 for event in run.events("round", "passed")), default=0)


def check_status(run: Run, least: int) -> None:
    """Of a run that goes on, which had merged so many rounds when it was gone on with."""
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    assert least <= status["rounds_merged"] <= status["round"] == pytest.approx(sum(status["versions"]), abs=4)
    for one in status["learners"]:
        assert one["step"] * TOKENS_A_STEP == one["tokens"]
    assert "nothing was merged in the others" not in run.ask("status", run.out).stdout


def go_on(run: Run, folder: Path, *words: str | Path) -> Run:
    again = Run(run.folder)
    again.out = folder
    return again.start("train", "--resume", *words)


def test_every_beginning_has_the_figures_of_the_whole_run(run: Run) -> None:
    bucket = f"file://{run.folder}/bucket"
    run.train(SCRIPTS / "line.py", "--learners", "2", "--steps", "100000", *FEW, *SLOW)
    run.until(lambda events: committed(run) > 12)
    check_live_figures(run)
    run.kill_everything()
    before = committed(run)
    cut_off = read_run(run.out)
    assert cut_off.state == "cut off" or cut_off.state == "going on"
    head = read_head(RunDir(run.out))
    assert head is not None and cut_off.summary["rounds"] == sum(head.versions)

    run.start("train", "--resume", run.out, "--store", bucket)
    run.until(lambda events: committed(run) > before + 12)
    check_status(run, before)
    check_live_figures(run)
    run.kill_everything()
    cut = max(int(path.name) for path in (run.out / "cuts").iterdir() if (path / "manifest.json").exists())
    head = read_head(RunDir(run.out))
    assert head is not None
    steps = str(int(head.step) + 60)  # on a crowded machine steps are ahead of rounds

    restored = run.command("restore", bucket, run.folder / "restored", "--take-over")
    assert restored.returncode == 0, restored.stderr
    last = go_on(run, run.folder / "restored", run.folder / "restored", "--steps", steps)
    last.until(lambda events: committed(last) > 0)
    check_live_figures(last)
    assert check_figures(last.ended().out, TOKENS_A_STEP)["rounds"] > before + 8

    out = run.folder / "fork"
    fork = go_on(run, out, run.out, "--from-cut", str(cut), "--out", out, "--steps", steps)
    fork.until(lambda events: committed(fork) > cut)
    check_live_figures(fork)
    assert check_figures(fork.ended().out, TOKENS_A_STEP)["rounds"] > cut


def test_a_takeover_and_a_resume_by_hand_have_the_figures_of_the_whole_run(run: Run) -> None:
    first, second = run.free_port(), run.free_port()
    run.start("syncer", "--learners", "2", "--out", run.out, "--port", str(first), *FEW)
    run.address()
    both = f"http://127.0.0.1:{first},http://127.0.0.1:{second}"
    names = ("anna", "bert")
    learners = [run.beside("learn", SCRIPTS / "line.py", "--syncer", both, "--name", name, *SLOW) for name in names]
    standby = run.beside("syncer", "--standby", run.out, "--port", str(second))
    run.until(lambda events: committed(run) > 8)
    run.until(lambda events: json.loads(run.ask("status", run.out, "--json").stdout)["standby"] != "")
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    before = committed(run)
    run.until_events(lambda events: committed(run) > before + 8)
    check_status(run, before)
    check_live_figures(run)

    standby.kill()
    standby.wait()
    before = committed(run)
    run.start("syncer", "--resume", run.out, "--port", str(first))
    run.until(lambda events: committed(run) > before + 8)
    check_status(run, before)
    check_live_figures(run)
    run.interrupt()
    run.ended()
    assert [learner.wait(60) for learner in learners] == [0, 0], (run.folder / "beside.log").read_text()
    assert check_figures(run.out, TOKENS_A_STEP)["rounds"] > before + 6
    assert len(run.events("reigned")) == 2, "the standby's term, and that of the resume"
