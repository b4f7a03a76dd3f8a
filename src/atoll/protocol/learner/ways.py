"""Rates of a learner's link: those of its way up and its way down, measured with the bodies that pass them anyway.

A body counts from its first piece to its last, so the wait for an answer is not included. The rate is the median of the
last `RECENT` bodies: a link that becomes wider or narrower is noticed after a few rounds, and a single body that stood
still does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from atoll.protocol.statistics import median

RECENT = 5
"""Number of bodies whose median is a rate."""


class MeasuredBody(NamedTuple):
    nbytes: int
    seconds: float


@dataclass(slots=True)
class WayRate:
    """Rate of one direction."""

    _bodies: deque[MeasuredBody] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a body, unless it came in a single piece: then it took no time that could be measured."""
        if nbytes > 0 and seconds > 0:
            self._bodies.append(MeasuredBody(nbytes, seconds))

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0 if nothing was measured yet."""
        return median(body.nbytes / body.seconds for body in self._bodies) if self._bodies else 0.0

    @property
    def body_bytes(self) -> float:
        """Mean size of the bodies; 0 if nothing was measured yet."""
        return sum(body.nbytes for body in self._bodies) / len(self._bodies) if self._bodies else 0.0


@dataclass(slots=True)
class Ways:
    """Both directions of a learner's link."""

    up: WayRate = field(default_factory=WayRate)
    down: WayRate = field(default_factory=WayRate)
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add_latency(self, seconds: float) -> None:
        if seconds > 0:
            self._latencies.append(seconds)

    @property
    def latencies(self) -> int:
        """Number of latencies that are remembered."""
        return len(self._latencies)

    @property
    def latency_s(self) -> float:
        """Shortest time from a request to the first piece of its answer, over the last `RECENT` that were measured: a
        busy syncer answers later, which is not the link's latency. The learner's state machine measures it with
        versions that were ordered alone (`Versions.measure_way`)."""
        return min(self._latencies, default=0.0)

    @property
    def pipe_bytes(self) -> float:
        """Bytes that are on their way down at once if the link is full: rate times round trip. Infinite before the rate
        was measured, which never happens if every body comes in one piece."""
        rate = self.down.bytes_per_s
        return rate * self.latency_s if rate else inf
