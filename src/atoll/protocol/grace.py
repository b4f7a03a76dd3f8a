"""The grace window: how long a round waits after quorum for more learners.

    slack = τ·ξ_step − (ξ_quorum + ξ_sync);   grace = clamp(γ·slack, 0, cap·ξ_step)

ξ_step, ξ_quorum, ξ_sync are exponential moving averages. Until they exist a round waits for all live learners, at most
a start-up time.

A pull has four times ξ_sync, which the slowest member sets: a slow link has its time. But whoever answers as late as it
may makes the next deadline longer, so there is an end to it: four times the deadline that the median learner's answers
would set. If all are slow, that is no bound; one alone cannot go past it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.settings import Settings

DEADLINE = 4
"""Times the usual that a pull may take."""
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

    def pull_deadline_s(self, settings: Settings, answer_s: float | None = None) -> float:
        """max(floor, 4 ξ_sync), at most 4 max(floor, 4 ξ_answer). `answer_s`: the median learner's ξ_answer."""
        by_all = max(settings.pull_floor_s, DEADLINE * (self.sync_s.value or 0.0))
        if answer_s is None:
            return by_all
        return min(by_all, DEADLINE * max(settings.pull_floor_s, DEADLINE * answer_s))


def grace_s(step_s: float | None, estimates: Estimates, settings: Settings) -> float:
    if not settings.grace:
        return 0.0
    quorum_s, sync_s = estimates.quorum_s.value, estimates.sync_s.value
    if step_s is None or quorum_s is None or sync_s is None:
        return settings.startup_s
    slack = settings.overlap * step_s - (quorum_s + sync_s)
    return max(0.0, min(settings.grace_share * slack, settings.grace_cap_steps * step_s))
