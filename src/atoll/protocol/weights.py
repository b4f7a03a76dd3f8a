"""How much each contribution counts in a merge: w = tokens · (tokens / steps), within a limit.

Rules kept here, each with its test: no weight is above `weight_limit` times the median of the others' (so one of n has
at most weight_limit / (weight_limit + n − 1) of a round in which the others are alike, whatever it claims; and fewer
than half of them gain nothing by claiming it together); what is below stays as it is, to the bit; a round of one or two
is never changed.

By default that is 8: a learner with steps like everybody's reaches it at 8 times their tokens, one with larger batches
(w grows with their square) at 2.8 times. Learners of one, two and four times the tokens are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.protocol.messages import Contribution
from atoll.protocol.pace import median

FEW = 2
"""In a round of so few nobody can tell which of them claims too much."""


def weight(given: Contribution) -> float:
    """Quantity × quality: w = tokens · (tokens / steps)."""
    return given.tokens * (given.tokens / given.steps)


def limited(weights: Sequence[float], limit: float) -> list[float]:
    """For whoever is above the middle, the median of the others is that of all but the largest."""
    if len(weights) <= FEW:
        return list(weights)
    most = limit * median(sorted(weights)[:-1])
    return [min(one, most) for one in weights]


def telling(names: Sequence[str], weights: Sequence[float], merged: Sequence[float], limit: float) -> str:
    """What was limited, for the round's reason; empty where nothing was."""
    all_of = zip(names, weights, merged, strict=True)
    cut = [f"{name} from {was:.4g} to {now:.4g}" for name, was, now in all_of if now < was]
    return f"weight limited to {limit:g} times the median of the others: {', '.join(cut)}" if cut else ""
