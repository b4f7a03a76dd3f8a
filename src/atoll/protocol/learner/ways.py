"""Rates of a learner's link: the rate of its way up and of its way down, measured from the bodies it sends anyway.

A body counts from its first piece to its last, so waiting for an answer is no part of it. The rate is the median of the
last `RECENT` bodies: a link that becomes wider or narrower is known after a few rounds, and a single body that stood
still does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from atoll.protocol.statistics import median

RECENT = 5
"""Bodies behind a rate."""


class MeasuredBody(NamedTuple):
    nbytes: int
    seconds: float


@dataclass(slots=True)
class WayRate:
    """Rate of one direction."""

    _bodies: deque[MeasuredBody] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a body. One that came in a single piece took no time and says nothing."""
        if nbytes > 0 and seconds > 0:
            self._bodies.append(MeasuredBody(nbytes, seconds))

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0 if nothing was measured yet."""
        return median(one.nbytes / one.seconds for one in self._bodies) if self._bodies else 0.0

    @property
    def body_bytes(self) -> float:
        """Mean size of the bodies; 0 if nothing was measured yet."""
        return sum(one.nbytes for one in self._bodies) / len(self._bodies) if self._bodies else 0.0


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
        """How many latencies are remembered."""
        return len(self._latencies)

    @property
    def latency_s(self) -> float:
        """Seconds from a request to the first piece of its answer: the shortest of late, because a busy syncer answers
        later and its link is no longer for that. Of versions that were ordered alone (`Versions.measure_way`)."""
        return min(self._latencies, default=0.0)

    @property
    def pipe_bytes(self) -> float:
        """Bytes on their way down at once when the link is full: rate times round trip. No limit before the rate was
        measured, which it never is where every body comes in one piece."""
        rate = self.down.bytes_per_s
        return rate * self.latency_s if rate else inf
