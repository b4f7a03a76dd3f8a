"""Which fragment a round takes, when it is due, and how many rounds may be under way.

Round n takes fragment n mod P, and there is one round per H/P learner steps: round n belongs to learner step
⌈(n + 1)·H/P⌉. Synchronous learners read its fragment τ steps before that and adopt the new version there; where τ
leaves no step before the first reading, the whole schedule is shifted until there is one.
"""

from __future__ import annotations

from atoll.protocol.settings import Settings


def fragment_of(round: int, settings: Settings) -> int:
    return round % settings.fragments


def interval(settings: Settings) -> float:
    """Learner steps from one round to the next."""
    return settings.sync_every / settings.fragments


def adopt_step(round: int, settings: Settings) -> int:
    """The nominal learner step at which the round's new version is taken."""
    first = -(-settings.sync_every // settings.fragments)
    shift = max(0, settings.overlap + 1 - first)
    return -(-(round + 1) * settings.sync_every // settings.fragments) + shift


def read_step(round: int, settings: Settings) -> int:
    """The nominal learner step after which a synchronous learner copies the round's fragment."""
    return adopt_step(round, settings) - settings.overlap


def flights(settings: Settings) -> int:
    """The most rounds between freezing and commit: min(P, ⌈τP/H⌉), at least one."""
    return max(1, min(settings.fragments, -(-settings.overlap * settings.fragments // settings.sync_every)))


def step_after(step: float, rounds: int, settings: Settings) -> float:
    """Synchronous: the run's step when so many more rounds are behind it than at `step`.

    A sum of H/P would drift. The rounds that `step` stands for are a whole number, and what comes out is again the one
    float next to a whole number times H/P: the same in one term and in many, and never short of a budget by rounding.
    """
    behind = round(step * settings.fragments / settings.sync_every)
    return (behind + rounds) * settings.sync_every / settings.fragments
