"""What the dashboard knows of a run, in bounded memory; it is sent as a snapshot or as a delta.

A round is `[round, moment, fragment, version, live, reason, members]`, members as a hexadecimal number with bit i for
lane i. A sample is a moment and the figures named in `SAMPLE`.

A lane is one learner's states in time. Events give them exactly, also of the past; a status gives the current one and
corrects what no event said. A lane keeps only its newest changes. The number of lanes is bounded: a new learner takes
the lane of one that is gone and in no round still shown; if there is none, it is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from contextlib import suppress
from statistics import median
from typing import Any, TypeAlias

import msgspec

from atoll.observe.tail import is_routine
from atoll.observe.timeline import is_good_end
from atoll.telemetry.events import Event
from atoll.telemetry.round_members import names_all
from atoll.telemetry.status import AWAY, LearnerStatus, RunStatus

ROUNDS = 480
NOTES = 60
SCORES = 400
SAMPLES = 600
SAMPLE = (
    "at",
    "goodput",
    "liveness",
    "participation",
    "merged_share",
    "alive",
    "effective_h",
    "grace_s",
    "behind",
    "in_per_s",
    "out_per_s",
    "loss",
    "loss_low",
    "loss_high",
    "tokens_per_s",
    "step",
    "tokens",
)
"""`step` is the run's, `tokens` those that are merged."""
QUIET = {"round", "again", "started", "run", "plan", "initial", "finishing", "courier", "score"}
"""Kinds of events that have no line of their own: they come too often, or are shown otherwise."""


class DashboardHistory:
    def __init__(self, began: float | None = None) -> None:
        """`began`: when the first parameters were there; None: an event will tell."""
        self.lanes = LearnerLanes()
        self.rounds: deque[list[Any]] = deque(maxlen=ROUNDS)
        self.notes: deque[list[Any]] = deque(maxlen=NOTES)
        self.scores = BoundedSeries(SCORES)
        self.samples = BoundedSeries(SAMPLES)
        self._began = began
        self._news: dict[str, list[Any]] = {"rounds": [], "notes": [], "scores": [], "samples": []}
        self._traffic: tuple[float, int, int] | None = None

    # ---- what is heard ----------------------------------------------------------------------------------------------

    def take_events(self, events: Iterable[Event]) -> None:
        """Events that this version cannot read are skipped."""
        for event in events:
            with suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                self._take_event(event)

    def _take_event(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "recovered" and self._began is None:
            self._began = event["at"]
        if kind == "round":
            self._take_round(event)
            return
        self.lanes.take_event(event, _Members(self.rounds))
        if kind == "score" and event.get("loss") is not None:
            self._add_point("scores", self.scores, [event["at"], event["round"], event["loss"]])
        if kind not in QUIET and not is_routine(event):
            self._keep_item("notes", self.notes, [event["at"], kind, str(event.get("text", ""))[:240]])

    def take_status(self, at: float, status: RunStatus) -> None:
        """Take in the state of now."""
        self.lanes.take_status(at, status.learners, _Members(self.rounds))
        rates = self._compute_rates(at, status)
        if status.phase in ("training", "ending"):
            self._add_point("samples", self.samples, _sample(at, status, rates))

    def _take_round(self, event: Event) -> None:
        # Of many learners most rounds name only those that are new in them: the others are those of the round before.
        members = 0 if names_all(event) or not self.rounds else int(self.rounds[-1][-1], 16)
        for member in event["members"]:
            if (place := self.lanes.find_lane(member["learner"], _Members(self.rounds))) is not None:
                members |= 1 << place
        said = [event.get(name) for name in ("round", "at", "fragment", "version", "live")]
        self._keep_item("rounds", self.rounds, [*said, str(event.get("reason", ""))[:160], f"{members:x}"])

    def _compute_rates(self, at: float, status: RunStatus) -> tuple[float | None, float | None]:
        before, self._traffic = self._traffic, (at, status.bytes_in, status.bytes_out)
        if before is None or at <= before[0]:
            return None, None
        return (status.bytes_in - before[1]) / (at - before[0]), (status.bytes_out - before[2]) / (at - before[0])

    def _add_point(self, name: str, series: BoundedSeries, point: Point) -> None:
        if series.add_point(point):
            self._news[name].append(point)

    def _keep_item(self, name: str, ring: deque[list[Any]], item: list[Any]) -> None:
        ring.append(item)
        self._news[name].append(item)
        del self._news[name][: -(ring.maxlen or 0)]

    # ---- what is told -----------------------------------------------------------------------------------------------

    def encode_snapshot(self, at: float, status: RunStatus) -> bytes:
        """Everything that is kept."""
        return _encode(
            {
                "type": "snapshot",
                "at": at,
                "began": self._began,
                "sample": SAMPLE,
                "names": self.lanes.names,
                "changes": [(i, *change) for i, lane in enumerate(self.lanes.changes) for change in lane],
                "marks": list(self.lanes.marks),
                "rounds": list(self.rounds),
                "notes": list(self.notes),
                "scores": self.scores.points,
                "samples": self.samples.points,
                "now": status,
            }
        )

    def encode_delta(self, at: float, status: RunStatus) -> bytes:
        """What has come since the last one; a snapshot where lanes have changed hands."""
        renamed, lanes = self.lanes.renamed, self.lanes.drain_news()
        news, self._news = self._news, {name: [] for name in self._news}
        if renamed:
            return self.encode_snapshot(at, status)
        new = {name: items for name, items in {**lanes, **news}.items() if items}
        return _encode({"type": "delta", "at": at, "began": self._began, **new, "now": status})


class _Members:
    """The lanes that the rounds still show."""

    def __init__(self, rounds: Iterable[list[Any]]) -> None:
        self._rounds = rounds

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and any(int(round[-1], 16) >> place & 1 for round in self._rounds)


def _sample(at: float, status: RunStatus, rates: tuple[float | None, float | None]) -> Point:
    there = [one for one in status.learners if one.state not in AWAY]
    losses = [one.loss for one in there if one.loss is not None]
    behind = [rounds_behind(status, one.version_round) for one in there if one.state == "training"]
    figures: Point = [
        round(at, 2),
        status.goodput,
        status.liveness,
        status.participation,
        status.merged_share,
        len(there) / max(1, status.expected),
        status.effective_h,
        status.grace_s,
        max(behind, default=None),
        *rates,
        median(losses) if losses else None,
        min(losses, default=None),
        max(losses, default=None),
        status.tokens_per_s,
    ]
    short = (figure if figure is None else _short(figure) for figure in figures[1:])
    return [figures[0], *short, status.global_step, status.fates.get("merged", 0)]


def rounds_behind(status: RunStatus, version_round: int) -> int:
    """How many rounds were committed since the newest that a learner holds."""
    return max(0, status.round - 1 - version_round)


def _short(figure: float) -> float:
    """A curve does not show more digits than these."""
    return float(f"{figure:.4g}")


def _encode(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message)


# ---- lanes ----------------------------------------------------------------------------------------------------------

LANES = 256
CHANGES = 40
"""Of one lane."""
MARKS = 400
"""Of all lanes together."""
SYNCER = "syncer"
"""Its lane is always the first."""

_STATES = {
    "recovered": "training",
    "probed": "training",
    "steps": "training",
    "muted": "muted",
    "starting": "starting",
    "stalled": "stalled",
    "quarantined": "quarantined",
    "lost": "away",
    "left": "gone",
}
_MARKED = {"killed", "exited", "restarted", "fault", "recovered", "quarantined"}

Change = tuple[int, float, str]
"""Lane, moment, state."""
Mark = tuple[int, float, str, str, float]
"""Lane, moment, kind, words, seconds it lasts."""


class LearnerLanes:
    def __init__(self) -> None:
        self.names = [SYNCER]
        self.changes: list[deque[tuple[float, str]]] = [deque(maxlen=CHANGES)]
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.fresh_changes: list[Change] = []
        self.fresh_marks: list[Mark] = []
        self.renamed = False
        """A lane has come or changed hands since the last look."""
        self._places = {SYNCER: 0}

    def find_lane(self, name: str, needed: Container[int] = ()) -> int | None:
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
            if place and place not in needed and changes and changes[-1][1] in ("away", "gone")
        ]
        return min(gone)[1] if gone else None

    def _take_over(self, place: int, name: str) -> None:
        del self._places[self.names[place]]
        self.names[place] = name
        self.changes[place].clear()
        self.marks = deque((mark for mark in self.marks if mark[0] != place), maxlen=MARKS)

    def set_state(self, place: int, at: float, state: str) -> None:
        changes = self.changes[place]
        if changes and (changes[-1][1] == state or at < changes[-1][0]):
            return
        changes.append((at, state))
        self.fresh_changes.append((place, at, state))

    def add_mark(self, place: int, event: Event, words: str, seconds: float = 0.0) -> None:
        mark = (place, event["at"], str(event["kind"]), words[:120], seconds)
        self.marks.append(mark)
        self.fresh_marks.append(mark)

    # ---- what is heard ----------------------------------------------------------------------------------------------

    def take_event(self, event: Event, needed: Container[int]) -> None:
        if event["kind"] in ("run", "reigned"):
            self.set_state(0, event["at"], "serving")
        for name in _concerned(event):
            if (place := 0 if name == SYNCER else self.find_lane(name, needed)) is not None:
                self._add_mark(place, event)

    def _add_mark(self, place: int, event: Event) -> None:
        kind, at = event["kind"], event["at"]
        if kind == "joined":
            self.set_state(place, at, "joining")
        elif kind in _STATES:
            self.set_state(place, at, _STATES[kind])
        elif kind in ("killed", "exited"):
            self.set_state(place, at, "away")
        if kind in _MARKED and not (kind == "exited" and is_good_end(event)):
            what = f"{event['what']}: " if "what" in event else ""
            self.add_mark(place, event, f"{what}{event.get('text', '')}", _seconds(event))

    def take_status(self, at: float, learners: tuple[LearnerStatus, ...], needed: Container[int]) -> None:
        """What a status says, of the learners that it knows."""
        self.set_state(0, at, "serving")
        for one in learners:
            if (place := self.find_lane(one.learner, needed)) is not None:
                self.set_state(place, at, one.state)

    def drain_news(self) -> dict[str, Any]:
        """What is new since the last time."""
        news = {"changes": self.fresh_changes, "marks": self.fresh_marks}
        self.fresh_changes, self.fresh_marks, self.renamed = [], [], False
        return news


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


# ---- bounded series -------------------------------------------------------------------------------------------------

Point: TypeAlias = list[float | int | None]
"""Its moment, then its figures."""


class BoundedSeries:
    def __init__(self, most: int) -> None:
        assert most >= 2
        self.points: list[Point] = []
        self._most = most
        self._spacing_s = 0.0

    def add_point(self, point: Point) -> bool:
        """Whether it was taken: points that come too soon after the last are not."""
        at = point[0]
        assert at is not None
        if self.points and at - _moment(self.points[-1]) < self._spacing_s:
            return False
        if len(self.points) >= self._most:
            self.points = self.points[::2]
            span_s = _moment(self.points[-1]) - _moment(self.points[0])
            self._spacing_s = 0.9 * span_s / max(1, len(self.points) - 1)
        self.points.append(point)
        return True


def _moment(point: Point) -> float:
    assert point[0] is not None
    return point[0]
