"""How a learner leaves in good order, with its state saved: within `LIMIT_S` where a signal asks for it.

It is asked by SIGTERM (a spot machine is taken away), by Ctrl-C, or by the syncer (a drain). Its training loop is told
that it is done at the next boundary; the last steps are given to the run as far as that takes no longer than `DRAIN_S`,
then its state is written to its folder, and whoever starts it again under the same name goes on with that inner
optimizer. Rules:
- nobody hurries a drain: it waits two cycles if those take longer, unless a signal comes meanwhile;
- one that is still joining waits for nothing more;
- signals are heeded only in the main thread, and only where the script has no handler of its own;
- the first Ctrl-C asks; the second, or one before training has begun, ends the script at once (KeyboardInterrupt).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

DRAIN_S = 10.0
"""How long the last steps may take to be merged, where a machine is taken away."""
LIMIT_S = 25.0
"""Within this time it is gone then; clouds give 30 s or more."""
FILE = "preempted.safetensors"
AGAIN = b"atoll: leaving in good order: the last steps go to the run; Ctrl-C again ends it at once\n"


class Preemption:
    def __init__(self) -> None:
        self.why = ""
        """Why it is to leave, for the run's events; empty: nobody asked."""
        self.hurried = False
        """A signal asked: there is a time by which it is to be gone."""
        self.begun = False
        """There are steps, or will be: from here on there is something to leave in good order."""
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    @property
    def asked(self) -> bool:
        return bool(self.why)

    def ask(self, why: str) -> None:
        """The first to ask is the reason."""
        self.why = self.why or why

    def watch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminated)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)

    def stop(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) in (self._terminated, self._interrupted):
                signal.signal(number, before)
        self._before.clear()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.hurried = True
        self.ask("its machine is taken away (SIGTERM)")

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker of a loader, forked off: it ends when the training process lets it go
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.hurried = True
        self.ask("it was interrupted (Ctrl-C)")
        os.write(2, AGAIN)  # print may have been interrupted in the middle of a line
