"""Learners that nobody supervises: `python script.py` with a join link, its part of cuts, and a resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Event, Run, heed_interrupts, members
from tests.system.joining import link_of, make_keys

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SETTINGS = "[protocol]\nlearners = 1\nfragments = 2\nsync_every = 4\noverlap = 1\ncut_every = 10\n"


def start_script(run: Run, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "line.py"), "--pace", "0.05"],
        cwd=run.folder,
        env=run.environment({"ATOLL_JOIN": where}),
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


@pytest.mark.faults
def test_parts_are_kept_by_the_run_and_not_by_its_address(run: Run) -> None:
    """A second run on the same address deleted them, and the first one on another address did not find them."""
    settings, other = run.folder / "settings.toml", Run(run.folder)
    settings.write_text(SETTINGS)
    port = str(run.free_port())
    run.start("syncer", "--config", settings, "--out", run.out, "--port", port)
    parts = train_until_cut(run)
    other.out = run.folder / "other"
    other.start("syncer", "--config", settings, "--out", other.out, "--port", port)
    assert not set(train_until_cut(other)) & set(parts) and all(part.exists() for part in parts)

    run.start("syncer", "--resume", run.out, "--port", "0")
    run.until(lambda events: len([event for event in events if event["kind"] == "started"]) == 2)
    run.until(lambda events: (run.out / "syncer.url").read_text() != f"http://127.0.0.1:{port}")
    learner = start_script(run, run.address())
    run.until(lambda events: 2 in {incarnation for _, incarnation in members(events)})
    run.interrupt()
    run.ended()
    said = learner.communicate(timeout=WAIT_S)[1]
    assert "goes on with the inner optimizer, schedules and random states of step" in said


def train_until_cut(run: Run) -> list[Path]:
    """One learner by the syncer's address; the parts that it leaves."""
    before = set(Path(run.folder, "atoll-learners").glob("*/*/cut-*.safetensors"))
    learner = start_script(run, run.address())
    run.until(lambda events: bool(cuts_with_learners(events)))
    run.interrupt()
    run.ended()
    said = learner.communicate(timeout=WAIT_S)[1]
    assert learner.returncode == 0, said
    return [part for part in Path(run.folder, "atoll-learners").glob("*/*/cut-*.safetensors") if part not in before]


def cuts_with_learners(events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == "cut" and event["learners"]]


def test_plain_python_joins_by_a_link_and_goes_on_with_its_own_part_of_a_cut(run: Run) -> None:
    keys, settings, file = make_keys(run), run.folder / "settings.toml", run.folder / "link"
    settings.write_text(SETTINGS)
    port = str(run.free_port())
    run.start("syncer", "--config", settings, "--out", run.out, "--keys", keys, "--port", port)
    file.write_text(link_of(run, keys))
    file.chmod(0o600)

    learner = start_script(run, str(file))
    run.until(lambda events: bool(cuts_with_learners(events)))
    name = next(iter(members(run.events())))[0]
    shown = run.ask("status", file)
    assert shown.returncode == 0 and name in shown.stdout, shown.stderr
    run.interrupt()
    run.ended()
    assert f"{name} joined (incarnation 1)" in run.stdout and "goes on at round" not in run.stdout
    said = learner.communicate(timeout=WAIT_S)[1]
    assert learner.returncode == 0 and f" as {name}\n" in said and "joined run " in said, said
    parts = list(Path(run.folder, "atoll-learners").glob(f"*/{name}/cut-*.safetensors"))
    assert parts, "in a folder of its own, though nobody named one"
    asked = run.ask("replay", run.out)
    assert asked.returncode == 2 and "were started by hand, so their script is not known here" in asked.stderr
    again = run.command("replay", run.out, SCRIPTS / "line.py", "--", "--pace", "0")
    assert again.returncode == 0 and " rounds made again, 0 read from the journal" in again.stdout, again

    run.start("syncer", "--resume", run.out)  # where it listened before: the link stays good
    again = start_script(run, str(file))
    run.until(lambda events: (name, 2) in members(events))
    run.interrupt()
    run.ended()
    assert run.stdout.count("goes on at round") == 1 and f"{name} joined (incarnation 2)" in run.stdout
    assert [one["after"] for one in run.summary["resumes"]] == ["ended"], "as after atoll train --resume"
    rounds = [event["at"] for event in run.events("round")]
    outage_s = max(b - a for a, b in pairwise(rounds))
    assert run.summary["longest_gap_s"] < outage_s and run.summary["wall_s"] < rounds[-1] - rounds[0]
    said = again.communicate(timeout=WAIT_S)[1]
    assert again.returncode == 0 and "goes on with the inner optimizer, schedules and random states of step" in said


@pytest.mark.faults
def test_an_evaluator_waits_for_the_next_syncer_and_one_that_is_killed_is_missed(run: Run) -> None:
    port = run.free_port()
    run.start("syncer", "--learners", "1", "--out", run.out, "--port", str(port), "--set", "evaluate_every=8")
    url, script = run.address(), SCRIPTS / "scored.py"
    learner = run.beside("learn", script, "--syncer", url, "--name", "anna")
    evaluator = run.beside("learn", script, "--syncer", url, "--evaluator")
    run.until(lambda events: {"evaluator", "score"} <= {e["kind"] for e in events})
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    run.start("syncer", "--resume", run.out)
    run.until(lambda events: "score" in {e["kind"] for e in events[_find_last(events, "reigned") :]})
    assert json.loads(run.ask("status", run.out, "--json").stdout)["evaluator"] is True

    evaluator.kill()
    run.until(lambda events: events[_find_last(events, "evaluator")]["gone"])
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    assert status["evaluator"] is False and "No evaluator: the last left at" in status["notice"]
    run.interrupt()
    run.ended()
    assert "an evaluator is here" in run.stdout and "the evaluator is gone: nothing was heard of it" in run.stdout
    assert learner.wait(WAIT_S) == 0 and evaluator.wait(WAIT_S) == -signal.SIGKILL


def _find_last(events: list[Event], kind: str) -> int:
    return max((place for place, event in enumerate(events) if event["kind"] == kind), default=len(events))


@pytest.mark.faults  # make integrations does the same by the tutorial
def test_after_a_resume_a_learner_comes_back_by_its_old_link(run: Run) -> None:
    """The syncer listens where it did."""
    trained = (SCRIPTS / "line.py", "--learners", "1", "--set", "sync_every=4", "--set", "cut_every=10")
    run.train(*trained, "--", "--pace", "0.05")
    address, file = run.address(), run.folder / "link.txt"
    file.write_text(run.ask("tokens", "link", "--run", run.out).stdout)
    file.chmod(0o600)
    by_link = run.beside("learn", SCRIPTS / "line.py", "--join", file, "--name", "by-link", "--", "--pace", "0.05")
    run.until(lambda events: {("learner-0", 1), ("by-link", 1)} <= members(events))
    run.interrupt()
    run.ended()
    assert by_link.wait(WAIT_S) == 0

    again = run.beside("learn", SCRIPTS / "line.py", "--join", file, "--name", "by-link", "--", "--pace", "0.05")
    run.start("train", "--resume", run.out)
    run.until(lambda events: ("by-link", 2) in members(events))
    assert run.address() == address
    run.interrupt()
    run.ended()
    assert again.wait(WAIT_S) == 0


@pytest.mark.faults
def test_a_resume_whose_port_is_taken_says_so_and_how_to_get_a_fresh_link(run: Run) -> None:
    run.train(SCRIPTS / "line.py", "--learners", "1", "--", "--pace", "0.05")
    run.until(lambda events: bool(members(events)))
    run.interrupt()
    run.ended()
    with socket.create_server(("127.0.0.1", urlsplit(run.address()).port or 0)) as other:
        run.start("train", "--resume", run.out)
        run.until(lambda events: [one["kind"] for one in events].count("finished") == 1 and len(members(events)) > 1)
        assert urlsplit(run.address()).port != other.getsockname()[1]
        run.interrupt()
        run.ended()
    assert "is taken: it listens on another one now" in run.stdout
    assert f"atoll tokens link --run {run.out}" in run.stdout
