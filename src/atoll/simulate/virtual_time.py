"""Virtual time: the queue of actions that are due, and the clocks of hosts.

Two actions that are due at the same time run in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]
"""Returns False if it was out of date, so that nothing happened."""


class EventQueue:
    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self.heap)

    def call_later(self, delay: float, action: Action, *arguments: Any) -> None:
        self.call_at(self.now + delay if delay > 0.0 else self.now, action, *arguments)

    def call_at(self, at: float, action: Action, *arguments: Any) -> None:
        """For channels that keep their order: a delay is rounded, and now + (at - now) may lie before `at`."""
        self._order += 1
        heapq.heappush(self.heap, (at, self._order, action, arguments))

    @property
    def next_at(self) -> float:
        return self.heap[0][0] if self.heap else float("inf")

    def step(self) -> bool:
        """Run the next action; False if it was out of date."""
        self.now, _, action, arguments = heapq.heappop(self.heap)
        return action(*arguments) is not False


class HostClock:
    """A machine's own clock: monotonic, may run fast or slow, and jumps forward when its host was suspended."""

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
