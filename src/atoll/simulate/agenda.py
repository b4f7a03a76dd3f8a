"""Virtual time: what is to happen, in order of time, and among equals in the order in which it was put down."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]
"""One that finds itself out of date answers False: nothing has happened then."""


class Agenda:
    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self.queue)

    def later(self, delay: float, action: Action, *arguments: Any) -> None:
        self._order += 1
        at = self.now + delay if delay > 0.0 else self.now
        heapq.heappush(self.queue, (at, self._order, action, arguments))

    @property
    def next_at(self) -> float:
        return self.queue[0][0] if self.queue else float("inf")

    def step(self) -> bool:
        """Let the next thing happen; False when it was out of date."""
        self.now, _, action, arguments = heapq.heappop(self.queue)
        return action(*arguments) is not False
