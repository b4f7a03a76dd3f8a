"""Whether this syncer is alive: its heartbeat to a standby, and how long its own event loop stood still.

- A syncer that was replaced while it stood still ends at its next heartbeat, also with nothing to write.
- While a loop is busy, its process stopped or its machine asleep, timers go off late and nothing is read. Afterwards
  everything is due at once, before the messages that learners sent meanwhile are read. So whoever judges by the clock
  asks `Standstill` first. It looks at the loop four times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from atoll.numerics.screen import UsualNorms
from atoll.store.writer_lease import Deposed
from atoll.syncer.run_store import RunStore

BEAT_S = 1.0
"""Between two heartbeats to a standby."""
NORMS_BEATS = 3
"""Heartbeats between two writes of the usual norms (numerics/screen.py), which the next term reads."""
LOOK_S = 0.25
"""Between two looks at the event loop."""
LEAST_S = 0.5
"""Shorter standstills are not reported: no deadline is that close."""


async def send_heartbeats(run_store: RunStore, run: str, norms: Callable[[], UsualNorms | None]) -> None:
    """Until cancelled. `norms`: the usual norms now; None: none are known yet."""
    for number in count():
        await asyncio.to_thread(run_store.send_heartbeat)
        if number % NORMS_BEATS == 0 and (usual := norms()) is not None:
            await asyncio.to_thread(run_store.write_norms, run, usual)
        if run_store.fenced():
            raise Deposed
        await asyncio.sleep(BEAT_S)


class Standstill:
    def __init__(self, loop: asyncio.AbstractEventLoop, noticed: Callable[[], None]) -> None:
        """`noticed` is called at every look; it is to call `take_standstill_s`."""
        self._loop, self._noticed = loop, noticed
        self._seen_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._seen_at = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._check_loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take_standstill_s(self, now: float) -> float:
        """How long the loop stood still just before `now`; 0: it did not, or this was returned before. Before `start`
        nobody is connected whose silence could count, and a run that had ended may not hear of anything else before it
        is opened again."""
        if self._timer is None:
            return 0.0
        gone_s, self._seen_at = now - self._seen_at, now
        return gone_s if gone_s >= LEAST_S else 0.0

    def _check_loop(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._check_loop)
        self._noticed()
