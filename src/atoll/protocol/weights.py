"""How much each contribution counts in a merge: w = tokens · (tokens / steps), within a limit.

Rules kept here, each with its test: no weight is above `weight_limit` times the mean of the round's weights, as they
are merged (so one learner of n has at most that many parts of n, whatever it claims); what is below stays as it is, to
the bit; a round of one or two is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from atoll.protocol.messages import Contribution

FEW = 2
"""In a round of so few nobody can tell which of them claims too much."""


def weight(given: Contribution) -> float:
    """Quantity × quality: w = tokens · (tokens / steps)."""
    return given.tokens * (given.tokens / given.steps)


def limited(weights: Sequence[float], limit: float) -> list[float]:
    """The largest are made equal to `limit` times the mean that is then left: c = limit · mean(min(w, c))."""
    count = len(weights)
    if count <= max(FEW, limit) or max(weights) <= limit * sum(weights) / count:
        return list(weights)
    largest = sorted(weights, reverse=True)
    for clipped in range(1, count):
        left = count - limit * clipped
        cap = limit * fsum(largest[clipped:]) / left if left > 0 else 0.0
        if largest[clipped] <= cap:
            return [min(one, cap) for one in weights]
    return [largest[-1]] * count


def telling(names: Sequence[str], weights: Sequence[float], merged: Sequence[float], limit: float) -> str:
    """What was limited, for the round's reason; empty where nothing was."""
    all_of = zip(names, weights, merged, strict=True)
    cut = [f"{name} from {was:.4g} to {now:.4g}" for name, was, now in all_of if now < was]
    return f"weight limited to {limit:g} times the mean: {', '.join(cut)}" if cut else ""
