"""A syncer that moved to another address is found again through the link's list."""

from __future__ import annotations

import os
import signal

import pytest
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.joining import link_of, make_keys

from atoll.store.verify import verify_run

pytestmark = pytest.mark.system


@pytest.mark.faults
def test_a_standby_on_the_links_second_address_goes_on_with_the_same_learner(run: Run) -> None:
    keys = make_keys(run)
    first, second = run.free_port(), run.free_port()
    run.start(
        "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(first),
        "--advertise", f"127.0.0.1:{first}", "--advertise", f"127.0.0.1:{second}",
    )  # fmt: skip
    link = link_of(run, keys)
    assert f"@127.0.0.1:{first},127.0.0.1:{second}/" in link
    standby = run.beside("syncer", "--standby", run.out, "--port", str(second))
    learner = run.beside("learn", SCRIPTS / "line.py", "--join", link, "--name", "learner-0")
    run.until(lambda events: sum(e["kind"] == "round" for e in events) >= 5)
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)

    run.until_events(lambda events: any(e["kind"] == "reigned" for e in events))
    taken_at = next(place for place, event in enumerate(run.events()) if event["kind"] == "reigned")
    run.until_events(lambda events: sum(e["kind"] == "round" for e in events[taken_at:]) >= 5)
    assert (run.out / "syncer.url").read_text() == f"https://127.0.0.1:{second}"
    assert members(run.events()) == {("learner-0", 1)}, "it is the same one, not one that came anew"
    printed = (run.folder / "beside.log").read_text()
    assert f"syncer at https://127.0.0.1:{second}, run" in printed
    assert f"syncer at https://127.0.0.1:{first}" not in printed
    assert "takes over in term 2" in printed and "learner-0 joined" not in printed, "of the past nothing is told"
    standby.send_signal(signal.SIGINT)
    assert standby.wait(60) == 0 and learner.wait(60) == 0, (run.folder / "beside.log").read_text()
    rounds = [event["round"] for event in run.events("round", "passed")]
    assert rounds == sorted(set(rounds)), "every round once"
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert report.facts["terms"] == 2
    assert run.summary["tokens"]["lost"] == 0


@pytest.mark.faults
def test_a_link_outlives_a_syncer_that_nobody_had_joined_yet(run: Run) -> None:
    keys = make_keys(run)
    first, second = run.free_port(), run.free_port()
    run.start(
        "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(first),
        "--advertise", f"127.0.0.1:{first}", "--advertise", f"127.0.0.1:{second}",
    )  # fmt: skip
    link = link_of(run, keys)
    learner = run.beside("learn", SCRIPTS / "line.py", "--join", link, "--name", "learner-0")
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    assert not members(run.events())
    run.start("syncer", "--resume", run.out, "--port", str(second))
    run.until(lambda events: members(events) == {("learner-0", 1)})
    run.interrupt()
    run.ended()
    assert learner.wait(60) == 0, (run.folder / "beside.log").read_text()
    assert verify_run(run.out).ok
