"""What a picture shows, whoever draws it. Shares run from 0 to 1 here and are shown in percent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from atoll.observe.figures import span

LaneKind: TypeAlias = Literal[
    "stepping",
    "training",
    "scaling down",
    "scaling up",
    "outage",
    "gone",
    "joining",
    "restarting",
    "recovering",
    "waiting",
    "away",
]
KINDS: tuple[LaneKind, ...] = get_args(LaneKind)
"""Activities of a learner, in the order of the legend. A report has the words of docs/look.md; "stepping" is that
of simulated learners, which may step with a share of their chips."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A table of shares, each cell in the colour of its share."""

    title: str
    note: str
    """One line under the title: where the constants come from."""
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    """From the top down."""
    values: tuple[tuple[float | None, ...], ...]
    """By row, then by column; None or NaN where there is no figure."""
    spreads: tuple[tuple[float | None, ...], ...] = ()
    """The ± of each value, in the same shape; or nothing at all."""
    column_label: str = ""
    row_label: str = ""

    def __post_init__(self) -> None:
        assert self.rows and self.columns, "a heat map has a cell at least"
        for table in (self.values, self.spreads) if self.spreads else (self.values,):
            assert len(table) == len(self.rows), f"{len(table)} rows of cells for {len(self.rows)} names"
            assert all(len(row) == len(self.columns) for row in table), "every row has a cell for every column"

    def value(self, row: int, column: int) -> float | None:
        return _figure(self.values[row][column])

    def spread(self, row: int, column: int) -> float | None:
        return _figure(self.spreads[row][column]) if self.spreads else None


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]
    """(x, share) from left to right, x above 0; a share that is NaN leaves a gap."""
    family: str = ""
    """Lines of one family share a colour and differ in their dashes, in the same order in every family."""

    def __post_init__(self) -> None:
        assert all(x > 0.0 for x, _ in self.points), f"{self.name}: a logarithmic axis has no place for 0"
        assert not any(abs(y) > 1.5 for _, y in self.points), f"{self.name}: shares run from 0 to 1, not to 100"


@dataclass(frozen=True, slots=True)
class CurveChart:
    """Shares over a logarithmic axis."""

    title: str
    note: str
    lines: tuple[Curve, ...]
    x_label: str
    y_label: str


@dataclass(frozen=True, slots=True)
class LaneSegment:
    """A time in which a learner did one thing."""

    start_s: float
    end_s: float
    kind: LaneKind
    share: float = 1.0
    """The part of the learner's slices that took part; below 1 it is drawn lighter if the learner is stepping."""


@dataclass(frozen=True, slots=True)
class LaneMark:
    """Something that happened to a learner: a failure."""

    at_s: float
    text: str
    name: str = "failure"
    """What the legend calls it; a page gives each name a sign of its own."""
    good: bool = False
    """It was over: drawn at the foot of the lane."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One learner in time."""

    name: str
    stretches: tuple[LaneSegment, ...]
    """In order of time, without overlaps; nothing is drawn where there is none."""
    marks: tuple[LaneMark, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneChart:
    """What each learner did, one lane under the other."""

    title: str
    note: str
    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        ends = [stretch.end_s for lane in self.lanes for stretch in lane.stretches]
        return max([*ends, *(mark.at_s for lane in self.lanes for mark in lane.marks)], default=0.0)


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """One figure as it changes in time."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(seconds, value) in order of time; a value that is NaN leaves a gap."""
    family: str = ""
    """As a line's."""
    steps: bool = False
    """It holds its value until the next point, as a count does."""
    dots: bool = False
    """Every point is a measurement of its own, and is shown."""


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Figures over time, on plain axes; drawn on pages only."""

    title: str
    note: str
    trails: tuple[TimeSeries, ...]
    y_label: str
    shares: bool = False
    """The values run from 0 to 1 and are shown in percent."""
    end_s: float = 0.0
    """Where the time axis ends at least: courses under each other line up."""
    x_label: str = ""
    """Unit of the x axis in place of seconds, such as steps; empty: seconds."""

    @property
    def last_s(self) -> float:
        return max([self.end_s, *(at_s for trail in self.trails for at_s, _ in trail.points)])


Picture: TypeAlias = HeatMap | CurveChart | LaneChart
"""What stands alone, as a page or an image."""
Drawable: TypeAlias = Picture | TimeChart
"""What may stand on a page among others."""


def _figure(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


# ---- fewer stretches ------------------------------------------------------------------------------------------------

MOST = 6_000
"""Stretches in a page, and marks in a page: a browser draws them in two or three seconds."""

MOST_IN_IMAGE = 40_000

FINEST = 4000
"""The first grain that is tried, as a part of the whole time: about a quarter of a pixel."""


def fitted(picture: LaneChart, most: int = MOST) -> tuple[LaneChart, float]:
    """The picture with `most` stretches and marks at the most, and its grain in seconds: 0 if it shows everything."""
    lanes = tuple(replace(lane, stretches=merged(lane.stretches)) for lane in picture.lanes)
    grain_s, shown = 0.0, lanes
    # A grain as long as the picture leaves one stretch and one mark to a lane: it cannot get fewer.
    while _crowded(shown, most) and grain_s < picture.end_s:
        grain_s = 1.5 * grain_s or picture.end_s / FINEST
        shown = tuple(
            Lane(lane.name, merged(pooled(lane.stretches, grain_s)), gathered(lane.marks, grain_s)) for lane in lanes
        )
    return replace(picture, lanes=shown), grain_s


def noted(note: str, grain_s: float) -> str:
    """The note of a picture, with what it does not show."""
    told = f"{note.rstrip('.')}. " if note else ""
    return f"{told}Stretches under {span(grain_s)} are drawn together." if grain_s else note


def merged(stretches: Iterable[LaneSegment]) -> tuple[LaneSegment, ...]:
    """Without empty ones, and without borders between two that are the same."""
    kept: list[LaneSegment] = []
    for stretch in stretches:
        if stretch.end_s <= stretch.start_s:
            continue
        if kept and _same(kept[-1], stretch):
            stretch = replace(stretch, start_s=kept.pop().start_s)
        kept.append(stretch)
    return tuple(kept)


def pooled(stretches: Iterable[LaneSegment], grain_s: float) -> list[LaneSegment]:
    """Short ones side by side become one of about a grain."""
    kept: list[LaneSegment] = []
    pool: list[LaneSegment] = []
    for stretch in stretches:
        long = stretch.end_s - stretch.start_s >= grain_s
        if pool and (long or stretch.start_s > pool[-1].end_s or stretch.end_s - pool[0].start_s > grain_s):
            kept.append(_sum(pool))
            pool = []
        (kept if long else pool).append(stretch)
    return [*kept, _sum(pool)] if pool else kept


def gathered(marks: Sequence[LaneMark], grain_s: float) -> tuple[LaneMark, ...]:
    """One mark for all of a grain."""
    groups: list[list[LaneMark]] = []
    for mark in sorted(marks, key=lambda mark: mark.at_s):
        if groups and mark.at_s - groups[-1][0].at_s < grain_s:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return tuple(_first_of(group) for group in groups)


def _crowded(lanes: Sequence[Lane], most: int) -> bool:
    return max(sum(len(lane.stretches) for lane in lanes), sum(len(lane.marks) for lane in lanes)) > most


def _same(one: LaneSegment, next_one: LaneSegment) -> bool:
    return one.end_s == next_one.start_s and (one.kind, one.share) == (next_one.kind, next_one.share)


def _sum(pool: Sequence[LaneSegment]) -> LaneSegment:
    """The kind that took most of the time; if that is stepping, the share that was stepping over the whole of it."""
    if len(pool) == 1:
        return pool[0]
    took = {stretch.kind: 0.0 for stretch in pool}
    for stretch in pool:
        took[stretch.kind] += stretch.end_s - stretch.start_s
    kind = max(took, key=lambda kind: took[kind])
    start_s, end_s = pool[0].start_s, pool[-1].end_s
    stepped_s = sum((s.end_s - s.start_s) * s.share for s in pool if s.kind == "stepping")
    return LaneSegment(start_s, end_s, kind, stepped_s / (end_s - start_s) if kind == "stepping" else 1.0)


def _first_of(group: Sequence[LaneMark]) -> LaneMark:
    if len(group) == 1:
        return group[0]
    within = span(group[-1].at_s - group[0].at_s)
    return replace(group[0], text=f"{group[0].text}, and {len(group) - 1} more within {within}")
