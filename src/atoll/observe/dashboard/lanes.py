"""Learners as lanes in time: from when to when each was in which state, and what befell it.

Events say it exactly, also of the past; a status says it of now, and mends what no event told. A lane keeps its newest
changes only. There are so many lanes at most: a new learner takes the lane of one that is gone and in no round that is
still shown, and is left out where there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Any

from atoll.telemetry.events import Event
from atoll.telemetry.status import LearnerStatus

LANES = 256
CHANGES = 40
"""Of one lane."""
MARKS = 400
"""Of all lanes together."""
SYNCER = "syncer"
"""Its lane is always the first."""

_STATES = {
    "recovered": "stepping",
    "probed": "stepping",
    "steps": "stepping",
    "muted": "muted",
    "stalled": "stalled",
    "quarantined": "quarantined",
    "lost": "gone",
    "left": "gone",
}
_MARKED = {"killed", "exited", "restarted", "fault", "recovered", "quarantined"}

Change = tuple[int, float, str]
"""Lane, moment, state."""
Mark = tuple[int, float, str, str, float]
"""Lane, moment, kind, words, seconds it lasts."""


class Lanes:
    def __init__(self) -> None:
        self.names = [SYNCER]
        self.changes: list[deque[tuple[float, str]]] = [deque(maxlen=CHANGES)]
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.fresh_changes: list[Change] = []
        self.fresh_marks: list[Mark] = []
        self.renamed = False
        """A lane has come or changed hands since the last look."""
        self._places = {SYNCER: 0}

    def place(self, name: str, needed: Container[int] = ()) -> int | None:
        """The lane of a learner; `needed` are lanes that cannot be given to another."""
        if name in self._places or not name:
            return self._places.get(name)
        place = len(self.names) if len(self.names) < LANES else self._abandoned(needed)
        if place is None:
            return None
        if place == len(self.names):
            self.names.append(name)
            self.changes.append(deque(maxlen=CHANGES))
        else:
            self._take_over(place, name)
        self._places[name], self.renamed = place, True
        return place

    def _abandoned(self, needed: Container[int]) -> int | None:
        gone = [
            (changes[-1][0], place)
            for place, changes in enumerate(self.changes)
            if place and place not in needed and changes and changes[-1][1] == "gone"
        ]
        return min(gone)[1] if gone else None

    def _take_over(self, place: int, name: str) -> None:
        del self._places[self.names[place]]
        self.names[place] = name
        self.changes[place].clear()
        self.marks = deque((mark for mark in self.marks if mark[0] != place), maxlen=MARKS)

    def say(self, place: int, at: float, state: str) -> None:
        changes = self.changes[place]
        if changes and (changes[-1][1] == state or at < changes[-1][0]):
            return
        changes.append((at, state))
        self.fresh_changes.append((place, at, state))

    def mark(self, place: int, event: Event, words: str, seconds: float = 0.0) -> None:
        mark = (place, event["at"], str(event["kind"]), words[:120], seconds)
        self.marks.append(mark)
        self.fresh_marks.append(mark)

    # ---- what is heard ----------------------------------------------------------------------------------------------

    def take(self, event: Event, needed: Container[int]) -> None:
        if event["kind"] in ("run", "reigned"):
            self.say(0, event["at"], "serving")
        for name in _concerned(event):
            if (place := 0 if name == SYNCER else self.place(name, needed)) is not None:
                self._befell(place, event)

    def _befell(self, place: int, event: Event) -> None:
        kind, at = event["kind"], event["at"]
        if kind == "joined":
            self.say(place, at, "recovering" if event.get("incarnation", 1) > 1 else "joining")
        elif kind in _STATES:
            self.say(place, at, _STATES[kind])
        elif kind in ("killed", "exited"):
            self.say(place, at, "gone")
        if kind in _MARKED and not (kind == "exited" and event.get("code") == 0):
            what = f"{event['what']}: " if "what" in event else ""
            self.mark(place, event, f"{what}{event.get('text', '')}", _seconds(event))

    def look(self, at: float, learners: tuple[LearnerStatus, ...], needed: Container[int]) -> None:
        """What a status says, of the learners that it knows."""
        self.say(0, at, "serving")
        for one in learners:
            if (place := self.place(one.learner, needed)) is not None:
                self.say(place, at, lane_state(one))

    def told(self) -> dict[str, Any]:
        """What is new since the last time."""
        news = {"changes": self.fresh_changes, "marks": self.fresh_marks}
        self.fresh_changes, self.fresh_marks, self.renamed = [], [], False
        return news


def lane_state(one: LearnerStatus) -> str:
    if one.state == "joining":
        return "recovering" if one.incarnation > 1 else "joining"
    return "stepping" if one.state == "training" else one.state


def _concerned(event: Event) -> list[str]:
    """The learners, or the syncer, that an event is about. A fault that happens to no learner happens to the syncer."""
    if event["kind"] == "refused" and "incarnation" not in event:
        return []  # it was never let in
    named = event.get("targets") or [event.get("learner") or event.get("process") or event.get("target")]
    names = [name for name in named if isinstance(name, str) and 0 < len(name) <= 64 and name != "evaluator"]
    return names or ([SYNCER] if event["kind"] == "fault" else [])


def _seconds(event: Event) -> float:
    seconds = event.get("seconds") if event["kind"] == "fault" else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
