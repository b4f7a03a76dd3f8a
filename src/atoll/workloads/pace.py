"""A step that lasts at least so long: many learners on few cores then go at one speed, and a death speeds nobody up."""

from __future__ import annotations

import time


class Pace:
    """`begin` when a step begins, `rest` before it ends: sleeps what is left of `pace_s`."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def rest(self) -> None:
        left = self._began + self._pace_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
