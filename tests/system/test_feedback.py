"""A run whose learners keep what their contributions leave out, through every kind of accident, and from its tape."""

from __future__ import annotations

import pytest
from tests.system.conftest import SCRIPTS, Event, Run, members
from tests.system.crashing import victims

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

LINE = (SCRIPTS / "line.py", "--learners", "2", "--set", "evaluate_every=0", "--set", "overlap=1")
WIDE = ("--", "--width", "32")


def goes_on(run: Run, rounds: int) -> None:
    at = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > at + rounds)


def reigned(events: list[Event]) -> bool:
    return any(event["kind"] == "reigned" for event in events)


def survive_accidents(run: Run) -> None:
    """Killed: a courier, whose successor finds the feedback; a learner and the syncer; everything at once, resumed."""
    run.until(lambda events: len(members(events)) == 2)
    goes_on(run, 30)
    assert victims.kill(run, "courier-0") and victims.kill(run, "learner-1")
    run.until(lambda events: ("learner-1", 2) in members(events))
    assert victims.kill(run, "syncer")
    run.until(reigned)
    goes_on(run, 30)
    run.kill_everything()
    run.start("train", "--resume", run.out)
    goes_on(run, 60)
    run.interrupt()
    run.ended()


@pytest.mark.parametrize(("codec", "adopt"), [("topk", "carry"), ("int4", "overwrite")])
def test_feedback_outlives_couriers_and_is_repeated_bit_for_bit(run: Run, codec: str, adopt: str) -> None:
    more = ("--set", f"codec={codec}", "--set", f"adopt={adopt}", "--set", "sync_every=4")
    run.train(*LINE, *more, *WIDE)
    survive_accidents(run)
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert "the courier died; another one is started" in (run.out / "logs" / "learner-0.log").read_text()
    run.check_replay()
