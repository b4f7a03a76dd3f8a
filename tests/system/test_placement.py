"""Runs whose learners encode on their device (here the CPU stands for it): accidents lose nothing, and a replay, which
encodes in host memory, gives the same bits."""

from __future__ import annotations

import pytest
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.crashing import victims
from tests.system.test_feedback import goes_on, survive_accidents

from atoll.launch.replay.recording import read_recording
from atoll.protocol.tape import AdoptedEntry
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

LINE = (SCRIPTS / "line.py", "--learners", "2", "--set", "evaluate_every=0", "--set", "overlap=1")
WIDE = ("--", "--width", "32")


def check(run: Run) -> None:
    report = verify_run(run.out)
    assert report.ok, report.problem
    log = (run.out / "logs" / "learner-0.log").read_text()
    assert "placement device (as asked): base, feedback and copies take" in log
    run.check_replay()


def adoption_rules(run: Run) -> list[str]:
    """Rules that learners adopted versions by, as the tape names them."""
    score = read_recording(record for _, record in read(run.out / "journal", disk=LocalDisk()))
    return [entry.rule for part in score.parts for entry in part.entries if isinstance(entry, AdoptedEntry)]


@pytest.mark.faults
@pytest.mark.parametrize("codec", ["topk", "bf16"])
def test_a_killed_courier_takes_no_feedback_along(run: Run, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.setenv("ATOLL_PLACEMENT", "device")
    run.train(*LINE, "--set", f"codec={codec}", "--set", "sync_every=4", *WIDE)
    run.until(lambda events: len(members(events)) == 2)
    goes_on(run, 20)
    assert victims.kill(run, "courier-0")
    goes_on(run, 30)
    run.interrupt()
    run.ended()
    assert "the courier died; another one is started" in (run.out / "logs" / "learner-0.log").read_text()
    check(run)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("codec", "adopt"), [("topk", "overwrite"), ("int4", "blend"), ("int8", "overwrite"), ("int4", "carry")]
)
def test_every_accident_is_survived_and_repeated_bit_for_bit(
    run: Run, monkeypatch: pytest.MonkeyPatch, codec: str, adopt: str
) -> None:
    monkeypatch.setenv("ATOLL_PLACEMENT", "device")
    rules = (f"codec={codec}", f"adopt={adopt}", "sync_every=4", "version_codec=int4")
    run.train(*LINE, *(word for rule in rules for word in ("--set", rule)), *WIDE)
    survive_accidents(run)
    check(run)


@pytest.mark.faults
@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_rule_of_adoption_changes_while_the_run_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """To carry and back, with copies under way each time; the replay follows the tape to the same bits."""
    monkeypatch.setenv("ATOLL_PLACEMENT", placement)
    run.train(*LINE, "--set", "codec=int4", "--set", "adopt=overwrite", "--set", "sync_every=4", *WIDE)
    run.until(lambda events: len(members(events)) == 2)
    goes_on(run, 20)
    for rule in ("carry", "overwrite", "carry"):
        assert run.ask("set", run.out, f"adopt={rule}").stdout.startswith(f"changed: adopt={rule}")
        goes_on(run, 40)
    run.interrupt()
    run.ended()
    assert [one["adopt"] for one in run.events("changed")] == ["carry", "overwrite", "carry"]
    rules = adoption_rules(run)
    assert rules.count("c") > 20 and rules.count("o") > 20
    log = (run.out / "logs" / "learner-0.log").read_text()
    assert "atoll: the copy to carry on from is gone" not in log, "no copy goes that the courier still names"
    assert verify_run(run.out).ok
    assert f"placement {placement} (as asked)" in log
    run.check_replay()


@pytest.mark.faults
@pytest.mark.parametrize("rule", ["synchronous=true", "synchronous=false"])
def test_a_learner_that_starts_over_starts_without_feedback(
    run: Run, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Its numbers break: it forgets all, takes the run's parameters, and is in rounds again."""
    monkeypatch.setenv("ATOLL_PLACEMENT", "device")
    run.train(*LINE, "--set", "codec=int8", "--set", "sync_every=4", "--set", rule, *WIDE, "--nan-at", "40")
    run.until(lambda events: ("learner-1", 2) in members(events))
    goes_on(run, 30)
    run.interrupt()
    run.ended()
    check(run)


@pytest.mark.faults
def test_learners_of_both_placements_are_in_one_run(run: Run) -> None:
    """By the script's argument: learner-1 has host."""
    run.train(*LINE, "--set", "codec=int8", "--set", "sync_every=4", *WIDE, "--placement-of-learner-0", "device")
    run.until(lambda events: len(members(events)) == 2)
    goes_on(run, 40)
    run.interrupt()
    run.ended()
    assert "placement" not in (run.out / "logs" / "learner-1.log").read_text()
    check(run)
