"""The samples a training process was leased: taken in the order granted, each once, counted when their step is done.

When leases run out because the syncer is out of reach, the last one is gone through again: counted, not leased.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.protocol.messages import Range


class Leased:
    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.position = 0
        """Leased samples whose steps are done."""
        self.over = False
        self._ranges: deque[Range] = deque()
        self.newest = -1
        self._at = 0
        """Samples of the first range that are taken."""
        self._began = False

    @property
    def ready(self) -> bool:
        """Whether a batch can be had: a new one, an old one once more, or none ever again."""
        return bool(self._ranges) or self._began or self.over

    @property
    def used_up(self) -> bool:
        return self.over and not self._ranges

    def supply(self, ranges: Sequence[Range], over: bool) -> None:
        for one in ranges:
            if one.lease > self.newest:
                self.newest = one.lease
                self._ranges.append(one)
        self.over = self.over or over

    def take(self) -> None:
        """The samples of one step."""
        wanted = self.batch
        self._began = True
        while wanted and self._ranges:
            first = self._ranges[0]
            taken = min(wanted, first.stop - first.start - self._at)
            self._at += taken
            self.position += taken
            wanted -= taken
            if self._at == first.stop - first.start:
                self._ranges.popleft()
                self._at = 0

    def forget(self) -> None:
        """Another life: what it was leased goes to whoever gets it next."""
        self._ranges.clear()
        self.newest = -1
        self._at = self.position = 0
        self.over = False
