from __future__ import annotations

from typing import Any

import pytest
from tests.observe.conftest import said

from atoll.observe.dashboard.history import DashboardHistory
from atoll.observe.tail import NotableEvents

ROUTINE: list[tuple[str, dict[str, Any]]] = [
    ("cut", {"cut": 240}),
    ("joined", {"learner": "a", "incarnation": 1}),
    ("exited", {"process": "a", "code": 0}),
    ("left", {"learner": "a", "incarnation": 1, "reason": "the run is over"}),
    ("helped", {"learner": "a"}),
]
NEWS: list[tuple[str, dict[str, Any]]] = [
    ("joined", {"learner": "a", "incarnation": 2}),
    ("exited", {"process": "a", "code": -9}),
    ("left", {"learner": "a", "incarnation": 1, "reason": "asked to leave"}),
    ("lost", {"learner": "a", "incarnation": 1, "reason": "nothing heard for 6 s"}),
    ("warning", {}),
]


@pytest.mark.parametrize(("kind", "fields"), ROUTINE)
def test_what_only_says_that_all_goes_well_has_no_line(kind: str, fields: dict[str, Any]) -> None:
    event = said(1.0, kind, **fields)
    history = DashboardHistory()
    history.take_events([event])
    assert not history.notes and not list(NotableEvents().take_events([event]))


@pytest.mark.parametrize(("kind", "fields"), NEWS)
def test_what_somebody_may_have_to_see_to_has_one(kind: str, fields: dict[str, Any]) -> None:
    event = said(1.0, kind, **fields)
    history = DashboardHistory()
    history.take_events([event])
    assert len(history.notes) == 1 and list(NotableEvents().take_events([event])) == [event]


def test_a_move_back_to_a_relay_is_no_loss() -> None:
    event = said(1.0, "lost", learner="a", incarnation=1, reason="its relay is there", moved=True)
    assert [one["kind"] for one in NotableEvents().take_events([event])] == ["moved"]


def test_what_repeats_itself_by_the_hundred_has_few_lines_and_a_count() -> None:
    notes = NotableEvents()
    refused = [said(0.1 * place, "refused", learner="a", incarnation=1, text="not finite") for place in range(290)]
    assert list(notes.take_events(refused)) == refused[:1]
    assert len(list(notes.take_events([said(29.0, "refused", learner="b", incarnation=1)]))) == 1, "of another learner"
    [later] = notes.take_events([said(31.0, "refused", learner="a", incarnation=9, text="not finite")])
    assert later["text"] == "not finite (and 289 more before it)"
    assert not list(notes.take_events([said(32.0, "refused", learner="a", incarnation=9)]))
    more = [said(float(at), "refused", learner="a", incarnation=9, text="not finite") for at in range(32, 400)]
    assert [event["at"] - 1000.0 for event in notes.take_events(more)] == [91.0, 211.0], "while it goes on, ever fewer"
    alarms = [said(33.0, "alarm", over=False) for _ in range(9)]
    assert len(list(notes.take_events(alarms))) == 9, "alarms all have a line"
