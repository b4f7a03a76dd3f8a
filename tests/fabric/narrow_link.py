"""A narrow link that knows what it really carried: on a busy machine that is less than it was set to."""

from __future__ import annotations

import asyncio

from atoll.chaos.tcp_relay import Bottleneck


class ObservedLink(Bottleneck):
    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self._began_at = self._last_at = 0.0
        self._nbytes = 0

    def begin(self) -> None:
        """Look at what comes from now on."""
        self._began_at = 0.0

    async def carry(self, count: int) -> None:
        await super().carry(count)
        self._last_at = asyncio.get_running_loop().time()
        if self._began_at:
            self._nbytes += count
        else:
            self._began_at, self._nbytes = self._last_at, 0

    @property
    def rate(self) -> float:
        """Bytes per second behind the first packet."""
        return self._nbytes / (self._last_at - self._began_at)
