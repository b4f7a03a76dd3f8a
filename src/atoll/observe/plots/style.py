"""Ticks, units and colours of pictures.

The colours can be told apart with any kind of colour vision, on light and on dark ground. The hues are those of Okabe
and Ito (Color Universal Design, 2008) without black, which a dark page swallows. The heat scale only gets darker, so
that it also reads in grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.observe.plots.pictures import Curve, LaneKind, TimeSeries


@dataclass(frozen=True, slots=True)
class Unit:
    name: str
    seconds: float


SECONDS, MINUTES, HOURS, DAYS = (
    Unit("seconds", 1.0),
    Unit("minutes", 60.0),
    Unit("hours", 3600.0),
    Unit("days", 86400.0),
)

_STEPS = {
    SECONDS: (1, 2, 5, 10, 20, 30),
    MINUTES: (1, 2, 5, 10, 20, 30),
    HOURS: (1, 2, 3, 6, 12),
    DAYS: (1, 2, 5, 7, 14, 30, 90, 365),
}


def unit_of(end_s: float) -> Unit:
    """The unit in which a time from 0 to `end_s` has a handful of whole ticks."""
    return next((unit for unit in (DAYS, HOURS, MINUTES) if end_s > 3 * unit.seconds), SECONDS)


def step_of(end_s: float, most: int = 12) -> float:
    """The distance of two ticks, in that unit."""
    unit = unit_of(end_s)
    steps = _STEPS[unit]
    return next((step for step in steps if end_s / unit.seconds / step <= most), end_s / unit.seconds / most)


def x_range(lines: Sequence[Curve]) -> tuple[float, float]:
    """The ends of a logarithmic axis."""
    xs = [x for line in lines for x, _ in line.points]
    low, high = min(xs, default=0.1), max(xs, default=100.0)
    return (low, high) if high > low else (low / 2, high * 2)


def decimal_ticks(low: float, high: float) -> list[float]:
    """1 and 3 of every power of ten; 1, 2 and 5 where that would leave only a few."""
    few = _ticks(low, high, (1, 3))
    return few if len(few) > 4 else _ticks(low, high, (1, 2, 5))


def _ticks(low: float, high: float, digits: tuple[int, ...]) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def digits(value: float) -> str:
    """0.1, 30, 1000: no exponents as long as they can be done without."""
    return f"{value:.6g}"


# ---- colours --------------------------------------------------------------------------------------------------------

BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
YELLOW, PALE_GREY, GREY = "#F0E442", "#C4C4C4", "#6E6E6E"

LINES = (BLUE, RED, GREEN, PINK, ORANGE, SKY)

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""By plotly's names."""

KIND_COLOURS: dict[LaneKind, str] = {
    "stepping": BLUE,
    "training": BLUE,
    "scaling down": ORANGE,
    "scaling up": YELLOW,
    "outage": RED,
    "gone": GREY,
    "joining": SKY,
    "restarting": YELLOW,
    "recovering": GREEN,
    "waiting": PINK,
    "away": PALE_GREY,
}

HEAT = ("#F8ECD0", "#BFDCC4", "#6DB6BB", "#2A81A6", "#12507F")
"""From the lowest share to the highest, evenly spaced: sand to sea."""


@dataclass(frozen=True, slots=True)
class ColourScheme:
    """What lies behind and around the data."""

    paper: str
    ink: str
    faint_ink: str
    grid: str


LIGHT = ColourScheme(paper="#FFFFFF", ink="#1C2126", faint_ink="#59626B", grid="#E3E7EB")
DARK = ColourScheme(paper="#14181C", ink="#E4E8EC", faint_ink="#9AA4AE", grid="#30373E")


@dataclass(frozen=True, slots=True)
class Stroke:
    colour: str
    dash: str


def strokes(lines: Sequence[Curve | TimeSeries]) -> list[Stroke]:
    """A colour per family and a dash within it; lines without a family differ in both. 30 pairs, then they repeat."""
    families = list(dict.fromkeys(_family(line) for line in lines))
    taken: set[Stroke] = set()
    chosen = []
    for line in lines:
        index = families.index(_family(line))
        first = 0 if line.family else index
        dashes = [DASHES[(first + step) % len(DASHES)] for step in range(len(DASHES))]
        wanted = [Stroke(LINES[index % len(LINES)], dash) for dash in dashes]
        stroke = next((stroke for stroke in wanted if stroke not in taken), wanted[0])
        taken.add(stroke)
        chosen.append(stroke)
    return chosen


def _family(line: Curve | TimeSeries) -> tuple[str, str]:
    return (line.family, "" if line.family else line.name)


def heat_range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of the heat scale: whole tens of percent around the values, never the same."""
    if not values:
        return 0.0, 1.0
    low = math.floor(10 * min(values)) / 10
    high = math.ceil(10 * max(values)) / 10
    return low, max(high, low + 0.1)


def ink_on_heat(value: float, low: float, high: float) -> str:
    """The colour of the text in a cell: whichever of dark and white stands out more."""
    place = min(1.0, max(0.0, (value - low) / (high - low))) * (len(HEAT) - 1)
    index = min(int(place), len(HEAT) - 2)
    below, above = _brightness(HEAT[index]), _brightness(HEAT[index + 1])
    bright = below + (above - below) * (place - index)
    dark, white = _brightness(LIGHT.ink), _brightness(LIGHT.paper)
    return LIGHT.ink if (bright + 0.05) / (dark + 0.05) > (white + 0.05) / (bright + 0.05) else LIGHT.paper


def _brightness(colour: str) -> float:
    """The relative luminance of the Web Content Accessibility Guidelines, to the nearest that matters."""
    red, green, blue = (math.pow(int(colour[at : at + 2], 16) / 255, 2.2) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def strength(share: float) -> float:
    """How solid a stepping stretch is drawn: one missing slice can be seen, and so can the last one left."""
    return 1.0 if share >= 1.0 else 0.25 + 0.5 * max(0.0, share)


def see_through(colour: str, share: float) -> str:
    """A stepping stretch's colour as CSS: what shines through is the page, light or dark."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{strength(share):.2f})"
