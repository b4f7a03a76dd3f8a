"""A syncer's machine is gone with its disk; learners that others started join the run that was restored elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.accounts import check_live_figures
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.joining import link_of, make_keys

from atoll.store.verify import verify_run

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore: make integrations"),
]

SLOW = ("--", "--pace", "0.1")
"""Of line.py: between two rounds there is time to compare figures."""


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_learners_of_a_lost_run_join_the_restored_one_with_their_own_optimizer_state(
    run: Run, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, port, bucket = make_keys(run), run.free_port(), f"file://{run.folder}/bucket"
    serve = ("--keys", keys, "--port", str(port), "--advertise", f"127.0.0.1:{port}")
    few = ("--set", "fragments=2", "--set", "sync_every=4", "--set", "cut_every=4")
    run.start("syncer", "--learners", "2", "--out", run.out, "--store", bucket, *few, *serve)
    link = link_of(run, keys)
    # Learners name the run that they joined by its link, and keep that link when the run has another name.
    learners = [
        run.beside("learn", SCRIPTS / "line.py", "--join", link, "--name", name, *SLOW) for name in ("anna", "bert")
    ]
    run.until(lambda events: _stores_a_cut(run.folder / "bucket") and len(members(events)) == 2)
    old = run.events("run")[0]["run"]
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    assert "durability = round: should this disk be lost" in run.stdout
    shutil.rmtree(run.out)

    again = run.folder / "again"
    keys.rename(copy := run.folder / "copy-of-keys")
    # Another machine has no record that the run began there: a restore is one, and asks nothing.
    monkeypatch.setenv("XDG_STATE_HOME", str(run.folder / "another-home"))
    restored = run.command("restore", bucket, again, "--take-over")
    assert restored.returncode == 0, restored.stderr
    assert re.search(
        r"go on with: atoll syncer --resume again (--port \d+ )?--keys DIR, a copy of the", restored.stdout
    )
    after = Run(run.folder)
    after.out = again
    after.start("syncer", "--resume", again, "--keys", copy)
    after.until(lambda events: {name for name, _ in members(events)} == {"anna", "bert"})
    assert [one.poll() for one in learners] == [None, None], "the processes that the lost run had"
    check_live_figures(after)
    new = after.events("reigned")[-1]["run"]
    assert new != old
    told = (run.folder / "beside.log").read_text()
    assert told.count(f"run {new} goes on for run {old}, whose disk was lost") == 2, told
    assert "inner optimizer of" not in told, "each keeps its own: none takes a peer's"

    if restarts:
        # One that is started again by the same link finds the state that it saved in the lost run, or since.
        learners[0].send_signal(signal.SIGTERM)
        assert learners[0].wait(60) == 0, (run.folder / "beside.log").read_text()
        learners[0] = run.beside("learn", SCRIPTS / "line.py", "--join", link, "--name", "anna", *SLOW)
        after.until(lambda events: ("anna", 3) in members(events))
        told = (run.folder / "beside.log").read_text()
        assert "goes on with the inner optimizer, schedules and random states" in told
    after.interrupt()
    after.ended()
    assert [one.wait(60) for one in learners] == [0, 0], (run.folder / "beside.log").read_text()
    summary = after.summary
    assert (summary["run"], summary["settings"]["learners"], summary["settings"]["sync_every"]) == (new, 2, 4)
    spent = {name: one["busy_s"] for name, one in summary["per_learner"].items()}
    assert all(busy_s <= summary["wall_s"] + 1 for busy_s in spent.values()), "the lost run's steps are not this one's"
    report = verify_run(again)
    assert report.ok, report.problem
    assert (again / "origin.bin").exists() and report.facts["unjudged"] == 0


def _stores_a_cut(bucket: Path) -> bool:
    """Whether the bucket holds a whole cut and the journal behind it, which follows later on a crowded machine."""
    cuts = [int(file.parts[-3]) for file in bucket.glob("cuts/*/*/manifest.json")]
    stored = [json.loads(file.read_bytes())["stored"] for file in bucket.glob("heads/*")]
    return bool(cuts) and max(stored, default=0) > min(cuts)
