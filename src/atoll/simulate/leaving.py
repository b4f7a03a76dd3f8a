"""How a training process that was asked to leave goes about it: it stops, waits for its last steps to be merged, goes.

It waits as the real one does (learner/script.py, a test holds the two together). Once the run ends it leaves with
everybody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.simulate.training import Training

DRAIN_S = 10.0
"""How long the last steps may take to be merged, where a machine is taken away."""
CYCLES = 2
"""So many cycles they may take where nobody hurries."""


@dataclass(slots=True)
class Leaving:
    why: str = ""
    """Empty: nobody asked."""
    hurried: bool = False
    waits_s: float = 0.0
    until: float = inf
    """When it goes, whatever it has left."""
    run_ends: bool = False
    """Then everybody waits for the end."""
    left: bool = False
    returns: bool = True
    """Whether another process takes its place afterwards."""
    saved: bool = False
    """And goes on with its inner optimizer."""
    then: Callable[[], object] = lambda: None

    def ask(self, why: str, *, hurried: bool) -> None:
        self.why, self.hurried = why, hurried

    def begin(self, now: float, one: Training) -> float:
        """Its loop has ended. How long it waits from here."""
        cycle_s = one.world.settings.sync_every * one.step_s
        self.waits_s = DRAIN_S if self.hurried else max(DRAIN_S, CYCLES * cycle_s)
        self.until = now + self.waits_s
        return self.waits_s

    def is_due(self, now: float, one: Training) -> bool:
        """Whether it goes now."""
        return bool(self.why) and not self.run_ends and (now >= self.until or not any(one.steps))
