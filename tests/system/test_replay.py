"""A real run with accidents, then the same run from its tape."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run, members

from atoll.store.verify import verify_run

pytestmark = pytest.mark.system

LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")


def test_a_run_with_a_killed_learner_and_a_killed_syncer_is_repeated_bit_for_bit(run: Run) -> None:
    run.train(*LINE)
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "reigned" for e in events))
    at = len(run.events("round"))
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + 20)
    run.interrupt()
    run.ended()
    run.check_replay()


def test_a_run_whose_loaders_prefetch_is_repeated_and_no_leased_sample_is_left_out(run: Run) -> None:
    """One is killed: what it had prefetched and not trained on goes to whoever is leased it next."""
    run.train(SCRIPTS / "loader.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    at = len(run.events("round"))
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + 20)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    run.check_replay()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_that_was_ended_killed_whole_and_gone_on_with_is_repeated(run: Run) -> None:
    """Long after the cuts that it went on from are gone."""

    def goes_on(rounds: int) -> None:
        at = len(run.events("round"))
        run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + rounds)

    run.train(*LINE, "--set", "cut_every=4")
    run.until(lambda events: len(members(events)) == 2)
    run.interrupt()
    run.ended()
    run.start("train", "--resume", run.out)
    goes_on(12)
    run.kill_everything()
    run.start("train", "--resume", run.out)
    goes_on(30)
    run.interrupt()
    run.ended()
    assert [one["after"] for one in run.summary["resumes"]] == ["ended", "killed"]
    run.check_replay()


@pytest.mark.faults
def test_a_part_of_a_run_and_a_script_that_does_something_else(run: Run) -> None:
    run.train(*LINE, "--steps", "60", "--set", "adopt=carry")
    run.ended()
    until = run.replay("--until", "5", "--jobs", "1")
    assert (until["identical"], until["through"]) == (True, 5)
    settings = run.out / "run.toml"
    settings.write_text(re.sub(r'("[^"]*line.py"),?', r'\1, "--rate", "0.06",', settings.read_text()))
    other = run.replay()
    assert other["difference"] == {"round": 0, "fragment": 0, "version": 1, "tensors": ["weight"]}, other


@pytest.mark.faults
def test_a_synthetic_tape_is_followed_and_what_comes_of_it_is_repeated(run: Run, tmp_path: Path) -> None:
    tape = tmp_path / "mixed.tape"
    faults = ("--fault", "kill:learner-1@20+10", "--fault", "crash@30+3")
    shape = ("--learners", "2", "--fragments", "2", "--sync-every", "4", "--overlap", "1", "--steps", "60")
    assert run.command("simulate", "tape", tape, *shape, "--step-s", "1,2.5", *faults).returncode == 0
    run.train(SCRIPTS / "line.py", "--tape", tape)
    run.ended()
    first = (run.out / "model.safetensors").read_bytes()
    assert run.replay()["identical"]
    run.train(SCRIPTS / "line.py", "--tape", tape, "--force")
    run.ended()
    assert (run.out / "model.safetensors").read_bytes() == first
