"""The figures that people read, each defined once: syncer, simulators, screens and summaries all use these.

goodput         seconds that learners spent stepping, over learner-seconds allocated (`LearnerTime`)
liveness        learner-seconds alive, over learner-seconds allocated
merged share    fragment-tokens merged over fragment-tokens computed, of those whose fate is known
participation   mean over rounds of members over learners alive and recovered when the round was frozen; learners
                whose links carry only a share of the rounds count in the rounds of their share alone
effective H     learner steps between two syncs of a fragment: their median, mean and 95th percentile
overlap         learner steps from reading a contribution to adopting the version that holds it: the same three

Losses and metrics are of any size: `format_score` is how all of them are written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import NamedTuple


class LearnerTime:
    """Learner-seconds of the training part: alive and allocated, moment by moment.

    At every moment as many are allocated as the run is meant for (M), or as are alive where more have joined by hand:
    a learner that was not asked for counts from when it joined to when it left. Nothing counts before the part begins
    or after it ends. Events come in order of time.
    """

    def __init__(self, meant: int) -> None:
        self._meant = meant
        self._alive: set[str] = set()
        self._alive_s = self._allocated_s = 0.0
        self._counted: float | None = None
        """Until when all is counted; None: outside the training part."""

    def begin_part(self, at: float) -> None:
        if self._counted is None:
            self._counted = at

    def end_part(self, at: float) -> None:
        self._count_until(at)
        self._counted = None

    def change_meant(self, at: float, learners: int) -> None:
        self._count_until(at)
        self._meant = learners

    def add_learner(self, at: float, name: str) -> None:
        self._count_until(at)
        self._alive.add(name)

    def remove_learner(self, at: float, name: str) -> None:
        self._count_until(at)
        self._alive.discard(name)

    def goodput(self, busy_s: float, now: float) -> float | None:
        """None: nothing is allocated yet. `busy_s`: of the time counted here, so of a learner from when it was first
        heard of in it. That may be a report early, hence never more than all of it."""
        _, allocated_s = self._totals(now)
        return min(1.0, busy_s / allocated_s) if allocated_s > 0 else None

    def liveness(self, now: float) -> float | None:
        alive_s, allocated_s = self._totals(now)
        return alive_s / allocated_s if allocated_s > 0 else None

    def _totals(self, now: float) -> tuple[float, float]:
        since_s = 0.0 if self._counted is None else max(0.0, now - self._counted)
        alive = len(self._alive)
        return self._alive_s + alive * since_s, self._allocated_s + max(self._meant, alive, 1) * since_s

    def _count_until(self, at: float) -> None:
        if self._counted is not None:
            self._alive_s, self._allocated_s = self._totals(at)
            self._counted = max(self._counted, at)


def merged_share(merged: int, computed: int, in_flight: int = 0) -> float | None:
    """None: nothing has a fate yet. What is in flight may still be merged: it counts for nothing so far."""
    settled = computed - in_flight
    return merged / settled if settled > 0 else None


def participation(members: int, alive: int) -> float:
    """Of one round. Whoever is a member was alive, whatever was believed of it when the round was frozen."""
    return members / max(1, members, alive)


def after_adoption(tokens: int, held: int, kept: int, dropped: int, missed: int) -> tuple[int, int]:
    """A fragment's counters `dropped`, and of those `missed`, once a version has been adopted over `tokens`.

    `held` of them are in the version, `kept` stay in the model (carry), the rest is dropped. A version that holds none
    of this learner's steps means that it missed the round; in one that holds some, the rest was made between reading
    the copy and adopting the version: overlap. Where the version holds more than `tokens`, steps that counted as missed
    are in it after all.
    """
    gone = tokens - held - kept
    dropped += gone
    missed += gone if held == 0 or gone < 0 else 0
    return dropped, max(0, min(missed, dropped))


class Spread(NamedTuple):
    """Of some samples; None where there are none."""

    median: float | None
    mean: float | None
    p95: float | None


def spread(samples: Sequence[int]) -> Spread:
    return spread_sorted(sorted(samples))


def spread_sorted(samples: Sequence[int]) -> Spread:
    """Of what is in order already. p95: 95 % of the samples are at most this (nearest rank)."""
    if not samples:
        return Spread(None, None, None)
    half, odd = divmod(len(samples), 2)
    middle = float(samples[half]) if odd else (samples[half - 1] + samples[half]) / 2
    return Spread(middle, sum(samples) / len(samples), float(samples[ceil(0.95 * len(samples)) - 1]))


class RecentSamples:
    """The newest so many samples, and their spread at any time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._samples: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, sample: int) -> None:
        self._samples.append(sample)
        insort(self._sorted, sample)
        if len(self._samples) > self._most:
            del self._sorted[bisect_left(self._sorted, self._samples.popleft())]

    @property
    def spread(self) -> Spread:
        return spread_sorted(self._sorted)

    def spread_of(self, newest: int) -> Spread:
        """Of the newest so many alone."""
        return spread(tuple(islice(reversed(self._samples), newest)))


SMOOTHING = 0.1
"""The weight of the newest sample."""


@dataclass(slots=True)
class Average:
    """An exponential moving average; None before its first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + SMOOTHING * (sample - self.value)


def median(values: Iterable[float]) -> float:
    return median_of_sorted(sorted(values))


def median_of_sorted(values: Sequence[float]) -> float:
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


class KeptValues:
    """One value of each learner that has one, kept in order, so that a median needs no sort.

    A value moves to its new place when it changes. The results equal those of a list sorted anew, to the bit.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._ordered: list[float] = []

    def put(self, name: str, value: float | None) -> None:
        """Keep this value of the learner in place of the one before; None: it has none any more."""
        before = self._values.get(name)
        if value == before:
            return
        if before is not None:
            del self._ordered[bisect_left(self._ordered, before)], self._values[name]
        if value is not None:
            insort(self._ordered, value)
            self._values[name] = value

    @property
    def median(self) -> float | None:
        return median_of_sorted(self._ordered) if self._ordered else None

    @property
    def lower_median(self) -> float | None:
        """The median; of two values in the middle, the lower one."""
        return self._ordered[(len(self._ordered) - 1) // 2] if self._ordered else None

    @property
    def highest(self) -> float | None:
        return self._ordered[-1] if self._ordered else None

    def median_without(self, name: str, least: int = 1) -> float | None:
        """Return the median of all values but this learner's; None if there are fewer than `least` of them."""
        own = self._values.get(name)
        gap = len(self._ordered) if own is None else bisect_left(self._ordered, own)
        count = len(self._values) - (own is not None)
        if count < max(1, least):
            return None
        lower, upper = (self._ordered[place + (place >= gap)] for place in ((count - 1) // 2, count // 2))
        return lower if count % 2 else (lower + upper) / 2


# ---- how a loss or a metric is written ------------------------------------------------------------------------------

UNKNOWN = "–"
SMALL_DIGITS = 4
"""Of what is below 1, at least: a loss of 0.0004213 is no 0.000."""
EXACT = 17
"""Digits that tell any two numbers apart."""


def format_score(value: float | None, digits: int = 3) -> str:
    """2.25, 0.9124, 0.004213, 1.2e+05. What is below 1 is never shown as 1, and only 0 as 0."""
    if value is None:
        return UNKNOWN
    if value == 0 or 1 <= abs(value) < 1e4:
        return f"{value:.{digits - 1}f}"
    if abs(value) < 1:
        digits = max(digits, SMALL_DIGITS)
    while abs(float(f"{value:.{digits}g}")) == 1 and digits < EXACT:
        digits += 1
    return f"{value:.{digits}g}"


def format_scores_apart(value: float | None, other: float | None) -> tuple[str, str]:
    """Both, with as many digits as tell them apart."""
    digits = 3
    while format_score(value, digits) == format_score(other, digits) and value != other and digits < EXACT:
        digits += 1
    return format_score(value, digits), format_score(other, digits)


def round_score(value: float) -> float:
    """To six digits, of whatever size it is."""
    return float(f"{value:.6g}")
