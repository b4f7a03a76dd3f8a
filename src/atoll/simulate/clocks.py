"""A machine's own clock: monotonic, but it may run fast or slow, and it jumps forward when its host was suspended."""

from __future__ import annotations


class HostClock:
    def __init__(self, rate: float = 1.0, ahead_s: float = 0.0) -> None:
        self.rate, self.ahead_s = rate, ahead_s
        self.last = 0.0

    def read(self, now: float, least: float = 0.0) -> float:
        """What it shows; `least`: a timer that went off cannot show less than it was set to."""
        self.last = max(self.last, self.ahead_s + self.rate * now, least)
        return self.last

    def when(self, shown: float) -> float:
        """The moment at which it will show this."""
        return (shown - self.ahead_s) / self.rate

    def jump(self, seconds: float) -> None:
        self.ahead_s += seconds
