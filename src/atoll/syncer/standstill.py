"""How long the syncer's own event loop did nothing, by its own clock.

Timers go off late and nothing is read while a loop is busy, its process is stopped or its machine sleeps; afterwards
all that was due is due at once, before what learners said meanwhile was read. So whoever judges by the clock asks here
first. The loop is looked at four times a second: where nothing was seen of it for longer than that, it stood still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.25
LEAST_S = 0.5
"""A shorter time without a sign of the loop is not told: nothing is judged as closely as that."""


class Standstill:
    def __init__(self, loop: asyncio.AbstractEventLoop, noticed: Callable[[], None]) -> None:
        """`noticed` is called where nobody else has asked; it asks."""
        self._loop, self._noticed = loop, noticed
        self._seen_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._seen_at = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take_s(self, now: float) -> float:
        """How long it stood still just before `now`; 0: it did not, or that was said already."""
        gone_s, self._seen_at = now - self._seen_at, now
        return gone_s if gone_s >= LEAST_S else 0.0

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self._noticed()
