"""A world that breaks a promise: the schedule is made shorter, and its story told."""

from __future__ import annotations

import pytest

from atoll.protocol.syncer.rounds import Rounds
from atoll.simulate import campaign
from atoll.simulate.campaign import SeedPlan
from atoll.simulate.faults import Fault
from atoll.simulate.reports import explain_failure, report, shrink


def test_what_it_does_not_take_is_left_out() -> None:
    assert shrink(range(20), lambda some: {3, 11} <= set(some)) == [3, 11]
    assert shrink(range(5), lambda some: True) == []
    assert shrink([1, 2], lambda some: len(some) == 2) == [1, 2]


def test_it_takes_no_more_runs_than_it_may() -> None:
    runs = []
    shrink(range(1000), lambda some: bool(runs.append(1)) or 999 in some, most_runs=7)
    assert len(runs) == 7


def planted(monkeypatch: pytest.MonkeyPatch) -> SeedPlan:
    """A contribution that is said twice is not known again; it takes a world in which things are said twice."""
    monkeypatch.setattr(Rounds, "has_given", lambda *arguments: False)
    faults = (
        Fault(12.0, "reset", 1, 1.0),
        Fault(20.0, "doubled", -1, 20.0),
        Fault(33.0, "pause", 0, 2.0),
        Fault(50.0, "kill", 2, 3.0),
    )
    plan = campaign.plan(1, 3)
    return SeedPlan(1, plan.options, faults)


def test_a_planted_fault_is_found_shrunk_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planted(monkeypatch)
    outcome = campaign.run(plan)
    assert outcome.invariant == "merged at most once" and "never came" in outcome.message
    told = explain_failure(outcome, plan)
    assert [fault.kind for fault in told.faults] == ["doubled"]
    assert told.command == "atoll simulate faults --seed 1 --learners 3"
    assert told.invariant == outcome.invariant
    assert any("FAULT 20.000 doubled" in line for line in told.story) or len(told.story) == 40
    assert any("Contribution" in line for line in told.story)
    assert explain_failure(outcome, plan) == told, "the same every time"


def test_a_world_that_keeps_its_promises_has_no_story() -> None:
    assert report(3, 2).told is None
