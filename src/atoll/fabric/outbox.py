"""Messages on their way to one peer: first in, first out, bounded, and never waited for by the one who puts them in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable


class Outbox:
    def __init__(self, limit: int, limit_bytes: int = 1 << 62) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._bytes = 0
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.closed = False

    def put(self, data: bytes) -> bool:
        """False if it is closed or full."""
        if self.closed or len(self._waiting) >= self._limit or self._bytes + len(data) > self._limit_bytes:
            return False
        self._waiting.append(data)
        self._bytes += len(data)
        self._news.set()
        return True

    def close(self, *, discard: bool = False) -> None:
        """Nothing more goes in; what is inside still goes out unless `discard`."""
        self.closed = True
        if discard:
            self._waiting.clear()
        self._news.set()

    async def drain(self, send: Callable[[bytes], Awaitable[None]], deadline_s: float) -> None:
        """Send everything in order until closed and empty. TimeoutError if the peer does not take a message in time."""
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                self._bytes -= len(data)
                async with asyncio.timeout(deadline_s):
                    await send(data)
            if self.closed:
                return
            self._news.clear()
            await self._news.wait()
