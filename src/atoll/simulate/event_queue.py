"""The event queue: virtual time, and the actions that are due.

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
        self._order += 1
        at = self.now + delay if delay > 0.0 else self.now
        heapq.heappush(self.heap, (at, self._order, action, arguments))

    @property
    def next_at(self) -> float:
        return self.heap[0][0] if self.heap else float("inf")

    def step(self) -> bool:
        """Run the next action; False if it was out of date."""
        self.now, _, action, arguments = heapq.heappop(self.heap)
        return action(*arguments) is not False
