"""Links of a given width in virtual time.

Bodies of one direction pass one after another, each at the whole rate, and wait in a queue without a limit, as in front
of a real link. Control messages take only the delay of the network: they are small, and a real link passes them between
the packets of a body.
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
    first_bytes: float = 0.0
    """Bytes of version 0 of a fragment; 0: version 0 passes like any other, and goes up in no time."""
    _up_free_at: float = 0.0
    _down_free_at: float = 0.0
    carried: float = 0.0
    """Bytes that have passed, in both directions."""

    def set_rates(self, up_rate: float, down_rate: float) -> None:
        """Make the link wider or narrower for bodies that come from now on. Those that wait pass as they were timed."""
        self.up_rate, self.down_rate = up_rate, down_rate

    def pass_up(self, now: float, share: float = 1.0) -> tuple[float, float]:
        """Let a contribution pass, or a share of one. Return the time at which its last byte is through, and how many
        seconds after its first that is."""
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
