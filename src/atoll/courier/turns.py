"""The order of bodies on the way up: one at a time, so that each arrives as early as the link lets it.

A body starts when the one before it has arrived, or when the measured rate says that it has left: its answer is then on
its way, and the link does not idle for a round trip. While no rate is measured nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from atoll.protocol.learner.ways import WayRate


@dataclass(slots=True)
class SentTurn:
    nbytes: int
    started_at: float
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class UploadTurns:
    """Belongs to one event loop."""

    def __init__(self, rate: WayRate) -> None:
        """`rate`: what the way up carries, as measured so far."""
        self._rate = rate
        self._lock = asyncio.Lock()
        self._before: SentTurn | None = None

    @asynccontextmanager
    async def take_turn(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until a body of this size may start; it has arrived, or failed, when the block ends."""
        async with self._lock:  # asyncio's locks are fair: bodies start in the order in which they were ready
            await self._wait_for_before()
            turn = self._before = SentTurn(nbytes, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            turn.arrived.set()

    async def _wait_for_before(self) -> None:
        before, bytes_per_s = self._before, self._rate.bytes_per_s
        if before is not None and bytes_per_s:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(before.started_at + before.nbytes / bytes_per_s):
                    await before.arrived.wait()
