"""Progress of a joining learner's download of the parameters, by its own reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.protocol.messages import TensorSpec

MB = 1e6
RECENT_S = 10.0
"""Time whose bytes say how long the rest takes."""
RECENT = 32
"""Most reports within that time that are remembered."""
NEWS_S = 10.0
"""Time between two events about the same download. A shorter download has none."""


@dataclass(slots=True)
class Download:
    """Bytes of the run's parameters that a learner lacks, over time."""

    whole: int = 0
    """Largest number of bytes that were lacking; 0: none were reported."""
    lacking: int = 0
    moved_at: float = 0.0
    """Time at which fewer bytes were lacking than ever before."""
    _least: int | None = None
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _news_at: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self.lacking > 0

    def note_lacking(self, now: float, lacking: int, most: int) -> None:
        """Take in a report. `most`: bytes of the run's model, which bound what a learner may claim; 0: not known."""
        lacking = min(lacking, most) if most else lacking
        if not self._seen or lacking > self._seen[-1][1]:  # the first report, or it starts over
            self._seen.clear()
            self._news_at = now + NEWS_S
        if self._least is None or lacking < self._least:
            self._least, self.moved_at = lacking, now
        self.whole, self.lacking = max(self.whole, lacking), lacking
        self._seen.append((now, lacking))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RECENT_S:
            self._seen.popleft()

    def put_off(self, now: float, seconds: float) -> None:
        """Count no time in which the syncer itself heard nothing."""
        self.moved_at = min(now, self.moved_at + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the rate of the last `RECENT_S`; None: not known."""
        if len(self._seen) < 2:
            return None
        (since, before), (at, lacking) = self._seen[0], self._seen[-1]
        return lacking * (at - since) / (before - lacking) if before > lacking and at > since else None

    def is_news(self, now: float) -> bool:
        """Return whether another event is due, and count it as made."""
        if not self.is_under_way or self._news_at is None or now < self._news_at:
            return False
        self._news_at = now + NEWS_S
        return True

    def describe(self) -> str:
        left_s = self.left_s
        left = "time left not known" if left_s is None else f"{left_s:.0f} s left"
        return f"{_in_mb(self.whole - self.lacking)} of {_in_mb(self.whole)} MB, {left}"


def _in_mb(nbytes: int) -> str:
    return f"{nbytes / MB:.3g}" if nbytes < 1000 * MB else f"{nbytes / MB:.0f}"


def parameter_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Return the bytes of all fragments together, as versions travel: fp32. 0: the tensors are not known."""
    total = 0
    for tensor in tensors:
        size = 4
        for length in tensor.shape:
            size *= length
        total += size
    return total
