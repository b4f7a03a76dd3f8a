"""Links of a given width: what a body waits for and takes on its way.

Bodies of one direction pass one after another, each at the whole rate: a queue without an end, as in front of a real
link. Control messages take the delay of the network alone; they are small, and real links pass them between packets of
a body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["up", "down"]


@dataclass(slots=True)
class SimulatedLink:
    up_rate: float
    """Bytes per second."""
    down_rate: float
    up_bytes: float
    """Bytes of a contribution."""
    down_bytes: float
    """Bytes of a version."""
    _up_free_at: float = 0.0
    _down_free_at: float = 0.0
    carried: float = 0.0
    """Bytes that have passed, both ways."""

    def set_rates(self, up_rate: float, down_rate: float) -> None:
        """Make the link wider or narrower for the bodies that have not begun to pass."""
        self.up_rate, self.down_rate = up_rate, down_rate

    def pass_up(self, now: float, share: float = 1.0) -> tuple[float, float]:
        """Let a contribution pass, or a share of one; return when its last byte is through and the seconds it took from
        its first."""
        seconds = share * self.up_bytes / self.up_rate
        self._up_free_at = max(now, self._up_free_at) + seconds
        self.carried += share * self.up_bytes
        return self._up_free_at, seconds

    def pass_down(self, now: float, share: float = 1.0) -> tuple[float, float]:
        """Let a version pass, likewise."""
        seconds = share * self.down_bytes / self.down_rate
        self._down_free_at = max(now, self._down_free_at) + seconds
        self.carried += share * self.down_bytes
        return self._down_free_at, seconds
