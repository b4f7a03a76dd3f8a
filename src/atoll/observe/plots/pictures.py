"""What a picture shows, whoever draws it. Shares run from 0 to 1 here and are shown in percent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "stepping", "scaling down", "scaling up", "outage", "gone", "joining", "recovering", "waiting", "away"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a learner may be doing, in the order of the legend."""


@dataclass(frozen=True, slots=True)
class Heat:
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
class Line:
    name: str
    points: tuple[tuple[float, float], ...]
    """(x, share) from left to right, x above 0; a share that is NaN leaves a gap."""
    family: str = ""
    """Lines of one family share a colour and differ in their dashes, in the same order in every family."""

    def __post_init__(self) -> None:
        assert all(x > 0.0 for x, _ in self.points), f"{self.name}: a logarithmic axis has no place for 0"
        assert not any(abs(y) > 1.5 for _, y in self.points), f"{self.name}: shares run from 0 to 1, not to 100"


@dataclass(frozen=True, slots=True)
class Curves:
    """Shares over a logarithmic axis."""

    title: str
    note: str
    lines: tuple[Line, ...]
    x_label: str
    y_label: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a learner did one thing."""

    start_s: float
    end_s: float
    kind: Kind
    share: float = 1.0
    """The part of the learner's slices that took part; below 1 it is drawn lighter if the learner is stepping."""


@dataclass(frozen=True, slots=True)
class Mark:
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
    stretches: tuple[Stretch, ...]
    """In order of time, without overlaps; nothing is drawn where there is none."""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Lanes:
    """What each learner did, one lane under the other."""

    title: str
    note: str
    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        ends = [stretch.end_s for lane in self.lanes for stretch in lane.stretches]
        return max([*ends, *(mark.at_s for lane in self.lanes for mark in lane.marks)], default=0.0)


@dataclass(frozen=True, slots=True)
class Trail:
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
class Course:
    """Figures over time, on plain axes; drawn on pages only."""

    title: str
    note: str
    trails: tuple[Trail, ...]
    y_label: str
    shares: bool = False
    """The values run from 0 to 1 and are shown in percent."""
    end_s: float = 0.0
    """Where the time axis ends at least: courses under each other line up."""

    @property
    def last_s(self) -> float:
        return max([self.end_s, *(at_s for trail in self.trails for at_s, _ in trail.points)])


Picture: TypeAlias = Heat | Curves | Lanes
"""What stands alone, as a page or an image."""
Drawable: TypeAlias = Picture | Course
"""What may stand on a page among others."""


def _figure(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
