"""Whether the peer at the other end of a control channel is still there: it is asked by a ping, and whatever it sends
next is an answer. Several that ask at the same time share one ping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

LOOKS = 4
"""A wait is made of so many parts: a loop that stood still uses up one of them, and reads the answer in the next."""


class Liveness:
    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        self._ping = ping
        self._heard = asyncio.Event()
        self._asking = 0

    def note(self) -> None:
        """It has sent something."""
        self._heard.set()

    async def answers(self, within_s: float) -> bool:
        if not self._asking:
            self._heard.clear()
        self._asking += 1
        try:
            return await self._ask(within_s)
        finally:
            self._asking -= 1

    async def _ask(self, within_s: float) -> bool:
        with suppress(OSError):  # a TimeoutError is one: it takes nothing in
            if self._asking == 1:
                async with asyncio.timeout(within_s):
                    await self._ping()
        for _ in range(LOOKS):
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s / LOOKS):
                    await self._heard.wait()
        return self._heard.is_set()
