"""Where the ticks go, and in which unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.observe.plots.pictures import Line


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


def x_range(lines: Sequence[Line]) -> tuple[float, float]:
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
