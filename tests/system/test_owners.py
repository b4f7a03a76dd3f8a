"""Whose a learner's name is outlives the syncer that knew it: killed with its learner, and another has taken over."""

from __future__ import annotations

import os
import signal

import pytest
from tests.system.conftest import SCRIPTS, Run
from tests.system.joining import link_of, make_keys

from atoll.store.verify import verify_run

pytestmark = pytest.mark.system


@pytest.mark.faults
def test_a_name_stays_its_tokens_when_the_syncer_is_killed_and_a_standby_takes_over(run: Run) -> None:
    keys, first, second = make_keys(run), run.free_port(), run.free_port()
    run.start(
        "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(first),
        "--advertise", f"127.0.0.1:{first}", "--advertise", f"127.0.0.1:{second}",
    )  # fmt: skip
    own = link_of(run, keys)
    other = run.command("tokens", "--keys", keys, "add", "bert").stdout.strip()
    standby = run.beside("syncer", "--standby", run.out, "--port", str(second))
    anna = run.beside("learn", SCRIPTS / "line.py", "--join", own, "--name", "anna")
    run.until(lambda events: sum(e["kind"] == "round" for e in events) >= 3)
    for pid in run.processes():
        if pid != standby.pid:
            os.kill(pid, signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    anna.wait(60)
    run.until_events(lambda events: any(e["kind"] == "reigned" for e in events))

    bert = run.beside("learn", SCRIPTS / "line.py", "--join", other, "--name", "anna")
    assert bert.wait(90) != 0
    log = (run.folder / "beside.log").read_text()
    assert "the name anna belongs to whoever holds the token 'join': choose another with --name" in log
    assert "Traceback" not in log

    run.command("tokens", "--keys", keys, "revoke", "join")
    begun = len(run.events("round"))
    bert = run.beside("learn", SCRIPTS / "line.py", "--join", other, "--name", "anna")
    run.until_events(lambda events: sum(e["kind"] == "round" for e in events) > begun + 3)
    standby.send_signal(signal.SIGINT)
    assert standby.wait(60) == 0 and bert.wait(60) == 0, (run.folder / "beside.log").read_text()
    report = verify_run(run.out)
    assert report.ok, report.problem
