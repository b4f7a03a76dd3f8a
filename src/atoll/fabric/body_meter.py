"""Meter of the rate at which bodies arrive, at the end that receives them.

Rules:
- a body counts from its first piece to its last, without the bytes of the first piece: the wait for it is latency;
- bodies that arrive at the same time share a link (the parts of a fragment from several shards, or the versions that a
  relay fetches for several learners): time counts once while any of them is arriving;
- bytes of other versions that arrive meanwhile count as well, because the link carried them. The next version is asked
  for before the last one is whole, so their ends overlap;
- the time between a body that broke off and its next request does not count;
- a body that came in one piece says nothing about a rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class MeasuredArrival(NamedTuple):
    """Bytes, and the seconds that they took; both 0 if nothing was measured."""

    nbytes: int = 0
    seconds: float = 0.0


class ArrivedBytes:
    """Number of bytes of all bodies that have arrived over a link."""

    def __init__(self) -> None:
        self.nbytes = 0


class PartArrival:
    """Arrival of one body, over all requests for it."""

    def __init__(self, meter: ArrivalMeter) -> None:
        self._meter = meter
        self._asked_at = 0.0
        self._arriving = False
        self.to_come = math.inf
        """Bytes still to come; infinite until a response has named its length."""
        self.work_s = 0.0
        """Seconds of work on the bytes that arrived."""

    def ask(self) -> None:
        """Note that a request is sent."""
        self._asked_at = self._meter.clock()

    def begin(self, nbytes: int) -> None:
        """Note the length that a response has named."""
        self.to_come = nbytes

    def count(self, nbytes: int) -> None:
        """Note a piece."""
        now = self._meter.clock()
        if not self._arriving:
            self._arriving = True
            self._meter.note_first_piece(now, nbytes, now - self._asked_at)
        else:
            self._meter.note_piece(now, nbytes)
        self.to_come -= nbytes
        self._meter.on_progress()

    def stop(self) -> None:
        """Note that nothing arrives until the next request."""
        if self._arriving:
            self._arriving = False
            self._meter.arriving -= 1

    def close(self) -> None:
        """Forget this body: it is whole, or given up."""
        self.stop()
        self._meter.forget_part(self)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time the work on the bytes that arrived."""
        began = self._meter.clock()
        try:
            yield
        finally:
            self.work_s += self._meter.clock() - began


class ArrivalMeter:
    """Meter of the bodies of one link, or of the parts of one version."""

    def __init__(
        self,
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        arrived: ArrivedBytes | None = None,
    ) -> None:
        """`on_progress` is called after every piece; `arrived` is shared by all meters of a link."""
        self.on_progress, self.clock = on_progress, clock
        self._arrived = arrived or ArrivedBytes()
        self._seen = 0
        """Bytes that had arrived over the link by the last piece."""
        self.arriving = 0
        """Number of bodies between their first piece and their last."""
        self.latency_s = 0.0
        """Shortest time from a request to the first piece of its response; 0 if none has come."""
        self.work_s = 0.0
        """Seconds of work on all bodies together, in addition to the work on each."""
        self._parts: set[PartArrival] = set()
        self._last_at = 0.0
        self._nbytes = self._whole_nbytes = 0
        self._seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time the work on all bodies together."""
        began = self.clock()
        try:
            yield
        finally:
            self.work_s += self.clock() - began

    def expect_part(self) -> PartArrival:
        part = PartArrival(self)
        self._parts.add(part)
        return part

    def forget_part(self, part: PartArrival) -> None:
        self._parts.discard(part)

    def note_first_piece(self, now: float, nbytes: int, latency_s: float) -> None:
        self.latency_s = min(self.latency_s, latency_s) if self.latency_s else latency_s
        if self.arriving:
            self.note_piece(now, nbytes)
        else:
            self._note(now, nbytes)
        self.arriving += 1

    def note_piece(self, now: float, nbytes: int) -> None:
        since, seen = self._last_at, self._seen
        self._note(now, nbytes)
        self._seconds += now - since
        self._nbytes += self._seen - seen

    def _note(self, now: float, nbytes: int) -> None:
        self._arrived.nbytes += nbytes
        self._last_at, self._seen = now, self._arrived.nbytes
        self._whole_nbytes += nbytes

    @property
    def to_come(self) -> float:
        """Bytes still to come of all bodies; infinite while the length of one is not known."""
        return sum(part.to_come for part in self._parts)

    def measure(self) -> MeasuredArrival:
        """Return the bytes that the link carried after the first piece, and the seconds in which they arrived. If the
        work on the body was slower than that, return all its bytes and the seconds of work."""
        if not self._nbytes or not self._seconds:
            return MeasuredArrival()
        work_s = self.work_s + max((part.work_s for part in self._parts), default=0.0)
        if work_s * self._nbytes > self._seconds * self._whole_nbytes:
            return MeasuredArrival(self._whole_nbytes, work_s)
        return MeasuredArrival(self._nbytes, self._seconds)

    def measure_whole(self) -> float:
        """Return the seconds that all bytes of the bodies take at the measured rate; 0 if nothing was measured."""
        return self._seconds * self._whole_nbytes / self._nbytes if self._nbytes else 0.0

    def take(self) -> MeasuredArrival:
        """Return the bytes that arrived since the last call and their seconds, and start over."""
        measured = MeasuredArrival(self._nbytes, self._seconds) if self._nbytes and self._seconds else MeasuredArrival()
        self._nbytes = self._whole_nbytes = 0
        self._seconds = self.latency_s = 0.0
        return measured
