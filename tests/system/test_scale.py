"""Learners added to a run that goes on, and taken away, as a user does it with `atoll scale`."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from tests.system.conftest import SCRIPTS, Run, members

pytestmark = pytest.mark.system

LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "overlap=1")


def test_a_run_grows_and_shrinks_and_its_account_balances(run: Run) -> None:
    run.train(*LINE, "--learners", "1")
    run.until(lambda events: len(members(events)) == 1)
    assert "1 learners become 3" in run.ask("scale", run.out, "+2").stdout
    run.until(lambda events: {"learner-0", "learner-1", "learner-2"} <= {name for name, _ in members(events)})
    run.ask("scale", run.out, "-2")
    run.until(lambda events: {e["learner"] for e in events if e["kind"] == "left"} == {"learner-1", "learner-2"})
    run.until(lambda events: {"learner-1", "learner-2"} <= {e["process"] for e in events if e["kind"] == "exited"})
    run.ask("scale", run.out, "2")  # under the name that it had, from the state that it left
    run.until(lambda events: ("learner-1", 2) in members(events))
    refused = run.ask("scale", run.out, "-2")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "the least is 1" in refused.stderr
    run.interrupt()
    run.ended()
    summary = run.summary
    assert summary["failure"] is None and summary["restarts"] == 0 and summary["tokens"]["lost"] == 0
    assert 0.2 < summary["liveness"] <= 1.0, "learners that were not asked for are not missed"
    assert run.ask("verify", run.out).returncode == 0


@pytest.mark.faults
def test_a_plan_of_hours_adds_learners_and_takes_them_away_again(run: Run) -> None:
    now = datetime.now()
    begins, ends = now - timedelta(minutes=5), now.replace(second=0) + timedelta(minutes=2)
    plan = f'[[scavenge]]\nfrom = "{begins:%H:%M}"\nto = "{ends:%H:%M}"\nlearners = 1\n'
    (run.folder / "plan.toml").write_text(plan)
    run.train(*LINE, "--learners", "1", "--config", run.folder / "plan.toml")
    run.until(lambda events: {name for name, _ in members(events)} == {"learner-0", "learner-1"})
    run.until(lambda events: any(e["kind"] == "left" and e["learner"] == "learner-1" for e in events))
    assert [event["planned"] for event in run.events("planned")] == [1, 0]
    run.interrupt()
    run.ended()
    assert run.ask("verify", run.out).returncode == 0


@pytest.mark.faults
def test_learners_of_before_are_no_suspects_when_a_run_doubles(run: Run) -> None:
    """With as many new learners as old ones, whose first contributions hold few steps, nothing is left out."""
    shape = ("--set", "fragments=24", "--set", "sync_every=24", "--set", "evaluate_every=0", "--robust")
    run.train(SCRIPTS / "together.py", *shape, "--learners", "2", "--", run.folder)
    run.until(lambda events: sum(e["kind"] == "round" for e in events) >= 24)
    run.ask("scale", run.out, "4")
    run.until(lambda events: len([e for e in events if e["kind"] == "round" and len(e["members"]) > 3]) >= 16)
    run.interrupt()
    run.ended()
    assert run.events("suspect") == []
    grown = [m for e in run.events("round") if len(e["members"]) > 2 for m in e["members"]]
    assert {m["learner"] for m in grown} == {f"learner-{n}" for n in range(4)}
    assert sum(m["filtered"] for m in grown) < 0.1 * sum(m["tokens"] for m in grown)
    tokens = run.summary["tokens"]
    assert tokens["filtered"] <= 0.1 * tokens["merged"] and "rolled_back" in tokens
    assert run.ask("verify", run.out).returncode == 0
