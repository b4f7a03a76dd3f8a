"""Which fragment a round takes, when it is due, and how many rounds may be under way.

Round n takes fragment n mod P, and there is one round per H/P learner steps: round n belongs to learner step
⌈(n + 1)·H/P⌉. Synchronous learners read its fragment τ steps before that and adopt the new version there; where τ
leaves no step before the first reading, the whole schedule is shifted until there is one.
"""

from __future__ import annotations

from math import ceil

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


def least_flights(settings: Settings) -> int:
    """Rounds that may always be between freezing and commit: ⌈τP/H⌉, at least one. Synchronous runs have no more."""
    return max(1, min(settings.fragments, -(-settings.overlap * settings.fragments // settings.sync_every)))


def most_flights(settings: Settings) -> int:
    """The most rounds between freezing and commit: one per fragment, and one fragment is left to gather."""
    least = least_flights(settings)
    return least if settings.synchronous else max(least, settings.fragments - 1)


def needed_flights(round_s: float, step_s: float, settings: Settings) -> int:
    """Rounds under way that keep one round per H/P steps, where one takes `round_s` from freezing to commit and a step
    `step_s`. One more than fit into that time: a round is due at the moment at which the oldest commits."""
    least, most = least_flights(settings), most_flights(settings)
    interval_s = interval(settings) * step_s
    if not 0 < round_s < most * interval_s:
        return most if round_s > 0 else least
    return max(least, min(most, ceil(round_s / interval_s) + 1))


def affordable_flights(budget: int, bytes_each: int, learners: int, settings: Settings) -> int:
    """Rounds whose contributions, of so many bytes in memory from each of the learners, fit into the budget. What τ
    asks for is always allowed."""
    most = most_flights(settings)
    taken = bytes_each * max(1, learners)
    return most if taken <= 0 else max(least_flights(settings), min(most, budget // taken))


def step_after(step: float, rounds: int, settings: Settings) -> float:
    """Synchronous: the run's step when so many more rounds are behind it than at `step`.

    A sum of H/P would drift. The rounds that `step` stands for are a whole number, and what comes out is again the one
    float next to a whole number times H/P: the same in one term and in many, and never short of a budget by rounding.
    """
    behind = round(step * settings.fragments / settings.sync_every)
    return (behind + rounds) * settings.sync_every / settings.fragments
