"""Those who were not let in: counted all, told once a second at most, so that whoever knocks fills no disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.telemetry.events import EventLog

AWAY_S = 1.0
"""Between two events of somebody who was not let in."""


class Strangers:
    def __init__(self, events: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._count, self._told_at = 0, -AWAY_S

    def turned_away(self, address: str, reason: str) -> None:
        self._count += 1
        now = self._clock()
        if now - self._told_at < AWAY_S:
            return
        self._told_at = now
        data: dict[str, object] = {"address": address, "reason": reason, "count": self._count}
        self._events.say("turned_away", f"{address} was not let in: {reason}", data)
