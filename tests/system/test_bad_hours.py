"""Bad hours of docs/runbook.md that no other test has whole: what its page says to type is what is typed here."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.joining import link_of, make_keys
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3
from tests.system.test_relays import LEARNERS, Region

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(400)]

FEW = ("--set", "fragments=2", "--set", "sync_every=8")
SLOW = ("--", "--pace", "0.05")


def count_rounds(run: Run) -> int:
    return len(run.events("round"))


def check_end(run: Run) -> None:
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert run.summary["tokens"]["in_flight"] == 0


def test_a_region_is_lost_with_its_relay_and_the_others_go_on(run: Run) -> None:
    region = Region(run)
    far = run.beside(
        *("learn", SCRIPTS / "line.py", "--syncer", run.address(), "--name", "far"),
        *("--folder", run.folder / "of-far", *SLOW),
    )
    run.until(lambda events: ("far", 1) in members(events))
    for process in (region.relay, *region.learners):
        process.kill()
        process.wait()
    before = count_rounds(run)
    run.until(lambda events: count_rounds(run) > before + 4)  # each asks fewer than its quorum only after patience_s
    assert {member["learner"] for member in run.events("round")[-1]["members"]} == {"far"}
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    states = {one["learner"]: one["state"] for one in status["learners"]}
    assert states == {"far": "training", **{f"learner-{number}": "away" for number in range(LEARNERS)}}
    assert any(event.get("gone") for event in run.events("relay"))

    # Learners elsewhere take the region's place by the same command.
    other = run.beside(
        *("learn", SCRIPTS / "line.py", "--syncer", run.address(), "--name", "other"),
        *("--folder", run.folder / "of-other", *SLOW),
    )
    run.until(lambda events: ("other", 1) in members(events))
    check_end(run)
    assert [one.wait(60) for one in (far, other)] == [0, 0]


def test_after_keys_leaked_learners_come_back_by_a_new_link_with_their_own_optimizer(run: Run) -> None:
    keys, port = make_keys(run), run.free_port()
    run.start(
        *("syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(port)),
        *("--advertise", f"127.0.0.1:{port}", "--set", "cut_every=4", *FEW),
    )
    old = link_of(run, keys)
    anna = run.beside("learn", SCRIPTS / "line.py", "--join", old, "--name", "anna", *SLOW)
    run.until(lambda events: any(event["kind"] == "cut" and event["learners"] for event in events))

    # The whole folder leaked: the certificate's key, and every token.
    assert run.ask("cert", "--out", keys, "--renew", "--force").returncode == 0
    new = run.ask("tokens", "--keys", keys, "add", "fresh", "--learner", "anna").stdout.strip()
    assert run.ask("tokens", "--keys", keys, "revoke", "join").returncode == 0
    run.until(lambda events: any(event["kind"] == "renewed" for event in events))
    assert anna.wait(60) == 2, (run.folder / "beside.log").read_text()
    assert "was revoked" in (run.folder / "beside.log").read_text()
    assert new.split("@")[1] != old.split("@")[1], "another certificate"
    refused = run.command("learn", SCRIPTS / "line.py", "--join", old, "--name", "anna")
    assert refused.returncode == 2, refused.stderr

    anna = run.beside("learn", SCRIPTS / "line.py", "--join", new, "--name", "anna", *SLOW)
    run.until(lambda events: ("anna", 2) in members(events))
    assert "goes on with the inner optimizer" in (run.folder / "beside.log").read_text()
    check_end(run)
    assert anna.wait(60) == 0


@pytest.mark.skipif(not possible(), reason="needs obstore and moto: make integrations")
def test_a_run_whose_bucket_is_lost_goes_on_without_it_and_takes_another(run: Run, s3: LocalS3) -> None:
    port, store = run.free_port(), ("--store", f"s3://{BUCKET}/run", "--set", "durability=store")
    run.start("syncer", "--learners", "1", "--out", run.out, "--port", str(port), *store, *FEW)
    url = run.address()
    learner = run.beside("learn", SCRIPTS / "line.py", "--syncer", url, "--name", "anna", *SLOW)
    run.until(lambda events: count_rounds(run) > 8)
    s3.down = True
    run.until(lambda events: any(event["kind"] == "alarm" for event in events))
    told = count_rounds(run)
    assert json.loads(run.ask("status", run.out, "--json").stdout)["store_alarm"]
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)

    again = ("syncer", "--resume", run.out)
    refused = run.command(*again)
    assert refused.returncode == 2 and "to go on without it: --store none" in refused.stderr, refused.stderr
    run.start(*again, "--store", "none", "--set", "durability=round")
    run.until(lambda events: count_rounds(run) > told + 8)
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)

    s3.down, other = False, f"s3://{BUCKET}/other"
    run.start(*again, "--store", other)
    told = count_rounds(run)
    run.until(lambda events: count_rounds(run) > told + 8)
    check_end(run)
    assert learner.wait(60) == 0 and run.summary["tokens"]["lost"] == 0
    assert run.command("verify", other).returncode == 0


def test_robust_is_turned_on_under_a_learner_that_lies_and_leaves_it_out(run: Run) -> None:
    run.train(
        *(SCRIPTS / "insider.py", "--learners", "4", "--steps", "100000", "--set", "synchronous=true"),
        *("--set", "fragments=2", "--set", "sync_every=12", "--set", "evaluate_every=0", "--", "flip"),
    )
    run.until(lambda events: any(e["kind"] == "suspect" and e["learner"] == "learner-3" for e in events))
    assert run.ask("set", run.out, "robust=true").returncode == 0
    run.until(lambda events: any(event["kind"] == "changed" for event in events))

    def shares(count: int) -> list[float]:
        rounds = [event for event in run.events("round") if len(event["members"]) == 4][-count:]
        return [m["influence"] for event in rounds for m in event["members"] if m["learner"] == "learner-3"]

    run.until(lambda events: len(shares(10)) == 10 and max(shares(10)) == 0.0)
    status = json.loads(run.ask("status", run.out, "--json").stdout)
    assert status["fates"]["filtered"] > 0
    assert [one["learner"] for one in status["learners"] if one["suspect"]] == ["learner-3"]
    check_end(run)
