"""SIGTERM to a learner (a spot machine is taken away): it leaves in good order, with its state saved, within `LIMIT_S`.

Its training loop is told that it is done at the next boundary; the last steps are given to the run as far as that takes
no longer than `DRAIN_S`, then its state is written to its folder, and whoever starts it again under the same name goes
on with that inner optimizer. Only in the main thread, and only where the script has no handler of its own.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

DRAIN_S = 10.0
"""How long the last steps may take to be merged."""
LIMIT_S = 25.0
"""Within this time it is gone; clouds give 30 s or more."""
FILE = "preempted.safetensors"


class Preemption:
    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._watching = False

    def watch(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._ask)
            self._watching = True

    def stop(self) -> None:
        if self._watching and signal.getsignal(signal.SIGTERM) == self._ask:
            signal.signal(signal.SIGTERM, self._before)
        self._watching = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
