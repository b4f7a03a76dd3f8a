"""Figures of runs that were gone on with, forked or restored: summary, report, status and the journal say the same."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.accounts import check_figures
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
    run.train(SCRIPTS / "line.py", "--learners", "2", "--steps", "100000", *FEW)
    run.until(lambda events: committed(run) > 12)
    run.kill_everything()
    before = committed(run)
    cut_off = read_run(run.out)
    assert cut_off.state == "cut off" or cut_off.state == "going on"
    head = read_head(RunDir(run.out))
    assert head is not None and cut_off.summary["rounds"] == sum(head.versions)

    run.start("train", "--resume", run.out, "--store", bucket)
    run.until(lambda events: committed(run) > before + 12)
    check_status(run, before)
    run.kill_everything()
    cut = max(int(path.name) for path in (run.out / "cuts").iterdir() if (path / "manifest.json").exists())
    head = read_head(RunDir(run.out))
    assert head is not None
    steps = str(int(head.step) + 60)  # on a crowded machine steps are ahead of rounds

    restored = run.command("restore", bucket, run.folder / "restored", "--take-over")
    assert restored.returncode == 0, restored.stderr
    last = go_on(run, run.folder / "restored", run.folder / "restored", "--steps", steps).ended()
    assert check_figures(last.out, TOKENS_A_STEP)["rounds"] > before + 8

    out = run.folder / "fork"
    fork = go_on(run, out, run.out, "--from-cut", str(cut), "--out", out, "--steps", steps).ended()
    assert check_figures(fork.out, TOKENS_A_STEP)["rounds"] > cut
