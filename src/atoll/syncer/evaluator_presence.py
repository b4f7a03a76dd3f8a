"""Whether an evaluator is here. It says so every few seconds, also while it scores; one that is killed says nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

GONE_S = 30.0
"""Seconds after which an evaluator that has said nothing is gone."""


class EvaluatorPresence:
    """Belongs to one event loop."""

    def __init__(self, say: Callable[[str, str, dict[str, object]], None], clock: Callable[[], float] = time.time):
        self._say, self._clock = say, clock
        self.heard_at: float | None = None
        """Time of the last word of one; None: there was none since this syncer began."""
        self.here: bool | None = None
        """None: there was none since this syncer began."""
        self._timer: asyncio.TimerHandle | None = None

    def note_word(self) -> None:
        if not self.here:
            self._say("evaluator", "an evaluator is here", {"gone": False})
        self.heard_at, self.here = self._clock(), True
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(GONE_S, self._note_silence)

    def _note_silence(self) -> None:
        self.here = False
        self._say("evaluator", f"the evaluator is gone: nothing was heard of it for {GONE_S:g} s", {"gone": True})

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
