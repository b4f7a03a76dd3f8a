"""What the dashboard knows of a run: bounded, whatever its length, and told as a whole or as what is new.

A round is `[round, moment, fragment, version, live, reason, members]`, members as a hexadecimal number with bit i for
lane i. A sample is a moment and the figures named in `SAMPLE`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from statistics import median
from typing import Any

import msgspec

from atoll.observe.dashboard.lanes import Lanes
from atoll.observe.dashboard.series import Point, Series
from atoll.observe.notes import is_routine
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

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
)
QUIET = {"round", "again", "started", "run", "plan", "initial", "finishing", "courier", "score"}
"""Kinds of events that have no line of their own: they come too often, or are shown otherwise."""


class History:
    def __init__(self, began: float | None = None) -> None:
        """`began`: when the first parameters were there; None: an event will tell."""
        self.lanes = Lanes()
        self.rounds: deque[list[Any]] = deque(maxlen=ROUNDS)
        self.notes: deque[list[Any]] = deque(maxlen=NOTES)
        self.scores = Series(SCORES)
        self.samples = Series(SAMPLES)
        self._began = began
        self._news: dict[str, list[Any]] = {"rounds": [], "notes": [], "scores": [], "samples": []}
        self._traffic: tuple[float, int, int] | None = None

    # ---- what is heard ----------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """An event that is not as this version writes it is left out."""
        for event in events:
            with suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                self._event(event)

    def _event(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "recovered" and self._began is None:
            self._began = event["at"]
        if kind == "round":
            self._round(event)
            return
        self.lanes.take(event, _Members(self.rounds))
        if kind == "score" and event.get("loss") is not None:
            self._series("scores", self.scores, [event["at"], event["round"], event["loss"]])
        if kind not in QUIET and not is_routine(event):
            self._keep("notes", self.notes, [event["at"], kind, str(event.get("text", ""))[:240]])

    def look(self, at: float, status: RunStatus) -> None:
        """Take in the state of now."""
        self.lanes.look(at, status.learners, _Members(self.rounds))
        rates = self._rates(at, status)
        if status.phase in ("training", "ending"):
            self._series("samples", self.samples, _sample(at, status, rates))

    def _round(self, event: Event) -> None:
        members = 0
        for member in event["members"]:
            if (place := self.lanes.place(member["learner"], _Members(self.rounds))) is not None:
                members |= 1 << place
        said = [event.get(name) for name in ("round", "at", "fragment", "version", "live")]
        self._keep("rounds", self.rounds, [*said, str(event.get("reason", ""))[:160], f"{members:x}"])

    def _rates(self, at: float, status: RunStatus) -> tuple[float | None, float | None]:
        before, self._traffic = self._traffic, (at, status.bytes_in, status.bytes_out)
        if before is None or at <= before[0]:
            return None, None
        return (status.bytes_in - before[1]) / (at - before[0]), (status.bytes_out - before[2]) / (at - before[0])

    def _series(self, name: str, series: Series, point: Point) -> None:
        if series.add(point):
            self._news[name].append(point)

    def _keep(self, name: str, ring: deque[list[Any]], item: list[Any]) -> None:
        ring.append(item)
        self._news[name].append(item)
        del self._news[name][: -(ring.maxlen or 0)]

    # ---- what is told -----------------------------------------------------------------------------------------------

    def snapshot(self, at: float, status: RunStatus) -> bytes:
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

    def delta(self, at: float, status: RunStatus) -> bytes:
        """What has come since the last one; a snapshot where lanes have changed hands."""
        renamed, lanes = self.lanes.renamed, self.lanes.told()
        news, self._news = self._news, {name: [] for name in self._news}
        if renamed:
            return self.snapshot(at, status)
        new = {name: items for name, items in {**lanes, **news}.items() if items}
        return _encode({"type": "delta", "at": at, "began": self._began, **new, "now": status})


class _Members:
    """The lanes that the rounds still show."""

    def __init__(self, rounds: Iterable[list[Any]]) -> None:
        self._rounds = rounds

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and any(int(round[-1], 16) >> place & 1 for round in self._rounds)


def _sample(at: float, status: RunStatus, rates: tuple[float | None, float | None]) -> Point:
    there = [one for one in status.learners if one.state != "gone"]
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
    return [figures[0], *(figure if figure is None else _short(figure) for figure in figures[1:])]


def rounds_behind(status: RunStatus, version_round: int) -> int:
    """How many rounds were committed since the newest that a learner holds."""
    return max(0, status.round - 1 - version_round)


def _short(figure: float) -> float:
    """A curve does not show more digits than these."""
    return float(f"{figure:.4g}")


def _encode(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message)
