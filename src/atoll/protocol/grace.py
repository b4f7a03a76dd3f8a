"""The grace window: how long a round waits after quorum for more learners.

    slack = τ·ξ_step − (ξ_quorum + ξ_sync);   grace = clamp(γ·slack, 0, cap·ξ_step)

ξ_step, ξ_quorum, ξ_sync are exponential moving averages. Until they exist a round waits for all live learners, at most
a start-up time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.settings import Settings

SMOOTHING = 0.1
"""The weight of the newest sample."""


@dataclass(slots=True)
class Average:
    """An exponential moving average; None before its first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + SMOOTHING * (sample - self.value)


@dataclass(slots=True)
class Estimates:
    """What the syncer has measured of its own rounds."""

    quorum_s: Average = field(default_factory=Average)
    """From the moment a round is due to its quorum."""
    sync_s: Average = field(default_factory=Average)
    """From freezing the members to the commit."""

    def pull_deadline_s(self, settings: Settings) -> float:
        """max(floor, 4 ξ_sync)."""
        return max(settings.pull_floor_s, 4 * (self.sync_s.value or 0.0))


def grace_s(step_s: float | None, estimates: Estimates, settings: Settings) -> float:
    if not settings.grace:
        return 0.0
    quorum_s, sync_s = estimates.quorum_s.value, estimates.sync_s.value
    if step_s is None or quorum_s is None or sync_s is None:
        return settings.startup_s
    slack = settings.overlap * step_s - (quorum_s + sync_s)
    return max(0.0, min(settings.grace_share * slack, settings.grace_cap_steps * step_s))
