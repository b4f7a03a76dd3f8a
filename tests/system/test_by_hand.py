"""Learners that nobody supervises: `python script.py` with a join link, its part of cuts, and a resume."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Event, Run, heed_interrupts, members
from tests.system.joining import link_of, make_keys

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SETTINGS = "[protocol]\nlearners = 1\nfragments = 2\nsync_every = 4\noverlap = 1\ncut_every = 10\n"


def start_script(run: Run, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "line.py")],
        cwd=run.folder,
        env=run.environment({"ATOLL_JOIN": where}),
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


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
    run.interrupt()
    run.ended()
    assert f"{name} joined (incarnation 1)" in run.stdout and "goes on at round" not in run.stdout
    said = learner.communicate(timeout=WAIT_S)[1]
    assert learner.returncode == 0 and f" as {name}\n" in said and "joined run " in said, said
    parts = list(Path(run.folder, "atoll-learners").glob(f"*/{name}/cut-*.safetensors"))
    assert parts, "in a folder of its own, though nobody named one"

    run.start("syncer", "--resume", run.out)  # where it listened before: the link stays good
    again = start_script(run, str(file))
    run.until(lambda events: (name, 2) in members(events))
    run.interrupt()
    run.ended()
    assert "goes on at round" in run.stdout and f"{name} joined (incarnation 2)" in run.stdout
    assert [one["after"] for one in run.summary["resumes"]] == ["ended"], "as after atoll train --resume"
    rounds = [event["at"] for event in run.events("round")]
    outage_s = max(b - a for a, b in pairwise(rounds))
    assert run.summary["longest_gap_s"] < outage_s and run.summary["wall_s"] < rounds[-1] - rounds[0]
    said = again.communicate(timeout=WAIT_S)[1]
    assert again.returncode == 0 and "goes on with the inner optimizer, schedules and random states of step" in said
