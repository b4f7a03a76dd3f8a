"""Runs that are stopped, killed as a whole, gone on with, taken over and changed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.system.accounts import check_figures
from tests.system.conftest import SCRIPTS, Run, members

from atoll.learner.snapshot import read
from atoll.protocol.records import BegunRecord
from atoll.store.cuts import read_syncer_part
from atoll.store.disk import LocalDisk
from atoll.store.journal import read as read_journal
from atoll.store.verify import verify_run

pytestmark = pytest.mark.system

EXACT = (
    *(SCRIPTS / "exact.py", "--set", "synchronous=true", "--set", "sync_every=6"),
    *("--set", "fragments=3", "--set", "evaluate_every=0"),
)
LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--set", "cut_every=20")


def cut_at(number: int):  # type: ignore[no-untyped-def]
    return lambda events: any(e["kind"] == "cut" and e["cut"] >= number for e in events)


@pytest.mark.parametrize(
    ("learners", "rounds"), [pytest.param(1, 6, id="few"), pytest.param(2, 20, id="twenty", marks=pytest.mark.faults)]
)
def test_rounds_a_kill_and_as_many_more_are_twice_as_many_bit_for_bit(
    run: Run, tmp_path: Path, learners: int, rounds: int
) -> None:
    """Parameters, momentum, inner optimizers, schedules, random states, bases and the place in the data.

    Few: the killed run itself had made twice as many rounds. Twenty: a run that nobody killed has."""
    cuts = ("--set", f"cut_every={rounds}", "--set", "keep_cuts=1000")  # the run may go on past the cut that is read
    common, steps = (*EXACT, "--learners", str(learners), *cuts), str(2 * (2 * rounds + 2))
    straight, again = (tmp_path / "straight" if rounds == 20 else run.out), tmp_path / "again"
    if straight != run.out:
        run.start("train", *common, "--steps", steps, "--out", straight).ended()
    run.train(*common, "--steps", "100000")
    run.until(cut_at(rounds if straight != run.out else 2 * rounds))
    run.kill_everything()
    run.start("train", "--resume", run.out, "--from-cut", str(rounds), "--steps", steps, "--out", again).ended()
    _, _, expected = read_syncer_part(straight / "cuts", 2 * rounds)
    _, _, found = read_syncer_part(again / "cuts", 2 * rounds)
    assert expected.keys() == found.keys() and len(expected) == 6
    assert all(np.array_equal(expected[name], found[name]) for name in expected), "Θ and momentum"
    for number in range(learners):
        part = f"learners/learner-{number}/cut-{2 * rounds:06}.safetensors"
        was, now = read(straight / part), read(again / part)
        assert was.tensors.keys() == now.tensors.keys()
        assert all(torch.equal(was.tensors[name], now.tensors[name]) for name in was.tensors), part
        assert was.states["optimizer"] == now.states["optimizer"]
        assert was.states["extra/schedule"] == now.states["extra/schedule"]
        assert was.rng == now.rng
    assert verify_run(straight).ok and verify_run(run.out).ok
    check_goes_on(run, again, steps=int(steps) + 12)


def check_goes_on(run: Run, ended: Path, steps: int) -> None:
    """A run whose steps were spent makes more. The sample of test_ends_and_resumes.py in every run of the tests."""
    before = json.loads((ended / "summary.json").read_text())
    run.start("train", "--resume", ended, "--steps", str(steps)).ended()
    after = json.loads((ended / "summary.json").read_text())
    assert after["reason"] == f"{steps} steps are done" and after["rounds"] > before["rounds"]
    assert after["tokens"]["computed"] > before["tokens"]["computed"] and after["tokens"]["in_flight"] == 0
    check_figures(ended)


@pytest.mark.faults
def test_a_run_that_was_killed_as_a_whole_goes_on_with_another_number_of_learners(run: Run) -> None:
    run.train(*LINE, "--learners", "2")
    run.until(cut_at(20))
    run.kill_everything()
    before = verify_run(run.out)
    assert before.ok, before.problem
    run.start("train", "--resume", run.out, "--learners", "3")
    run.until(lambda events: {("learner-0", 2), ("learner-1", 2), ("learner-2", 1)} <= set(members(events)))
    run.interrupt()
    run.ended()
    rounds = [e["round"] for e in run.events("round", "passed")]
    assert rounds == sorted(set(rounds)), "every round once"
    assert "learners=3" in run.events("changed")[0]["text"]
    after = verify_run(run.out)
    assert after.ok, after.problem
    assert after.facts["rounds"] > before.facts["rounds"]


@pytest.mark.faults
def test_a_new_run_from_a_cut_has_other_codecs_and_another_outer_optimizer(run: Run) -> None:
    run.train(*LINE, "--learners", "2", "--set", "fragments=2", "--set", "sync_every=4")
    run.until(cut_at(20))
    run.kill_everything()
    new = run.folder / "new"
    own = ("codec=int8", "version_codec=int8", "outer_optimizer=sgd")
    words = [word for one in own for word in ("--set", one)]
    run.start("train", "--resume", run.out, "--from-cut", "20", "--out", new, "--steps", "300", *words).ended()
    assert f"its model and optimizers, with {' '.join(own)}" in run.stdout
    report = verify_run(new)
    assert report.ok, report.problem
    begun = next(record for _, record in read_journal(new / "journal", disk=LocalDisk()))
    assert isinstance(begun, BegunRecord) and begun.settings.version_codec == "int8"
    assert "goes on with the inner optimizer" in (new / "logs" / "learner-0.log").read_text()
    check_goes_on(run, new, steps=400)


def test_a_second_syncer_refuses_and_a_standby_takes_over_from_one_that_stands_still(run: Run) -> None:
    run.start("syncer", "--learners", "1", "--port", "0", "--out", run.out)
    run.until(lambda events: any(e["kind"] == "run" for e in events))
    url = run.address()
    second = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "syncer", "--resume", str(run.out), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 2 and "is served by another syncer" in second.stderr
    assert second.stderr.count("\n") == 1
    port = run.free_port()
    standby = run.beside("syncer", "--standby", run.out, "--port", str(port))
    learner = run.beside(
        *("learn", SCRIPTS / "line.py", "--syncer", f"{url},http://127.0.0.1:{port}", "--name", "learner-0"),
        *("--", "--pace", "0.05"),
    )
    run.until(lambda events: len(members(events)) == 1)
    run.until(lambda events: json.loads(run.ask("status", run.out, "--json").stdout)["standby"] != "")
    assert f"pid {standby.pid}" in json.loads(run.ask("status", run.out, "--json").stdout)["standby"]
    paused = run.pid_of_command()
    os.kill(paused, signal.SIGSTOP)
    run.until(lambda events: any(e["kind"] == "reigned" for e in events))
    taken_at = next(i for i, e in enumerate(run.events()) if e["kind"] == "reigned")
    run.until(lambda events: any(e["kind"] == "round" for e in events[taken_at:]))
    before = len(run.events("round"))
    os.kill(paused, signal.SIGCONT)
    run.ended(code=5)
    assert "another syncer has taken over" in run.stderr
    run.until_events(lambda events: sum(e["kind"] == "round" for e in events) > before + 5)
    standby.send_signal(signal.SIGINT)
    assert standby.wait(60) == 0
    assert learner.wait(60) == 0
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert report.facts["terms"] >= 2


@pytest.mark.faults
def test_settings_change_while_it_runs_and_are_journaled(run: Run) -> None:
    run.train(*LINE, "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    said = run.command("set", run.out, "quorum=2", "outer_lr=0.3")
    assert said.returncode == 0 and "changed: quorum=2 outer_lr=0.3" in said.stdout
    wrong = run.command("set", run.out, "fragments=3")
    assert wrong.returncode == 1 and "'fragments' cannot change while a run goes on" in wrong.stderr
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "reigned" for e in events))
    at = next(i for i, e in enumerate(run.events()) if e["kind"] == "reigned")
    run.until(lambda events: any(e["kind"] == "round" for e in events[at:]))
    status = json.loads(run.command("status", run.out, "--json").stdout)
    assert status["quorum"] == 2, "it is still so in the next term"
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
