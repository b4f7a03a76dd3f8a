"""What a contribution weighs in a merge: w = tokens · (tokens / steps), within limits.

Rules kept here, each with its test:
- a weight is at most its limit times the median of all weights but the largest. The limit is 1 until `STEPS` steps of a
  learner were seen, then `weight_limit` (2), or what the operator set for this learner (`weight_limits`);
- in a round of three or more, nobody has more than half, whatever is set;
- weights within these limits stay as they are, to the bit; a round of one or two is never changed.

So one of n equal learners has at most 2 / (n + 1) of a round, whatever it claims, and a minority gains nothing by
claiming it together. A learner with 1.4 times the others' tokens per step reaches the limit, since w grows with their
square: allow it more with `weight_limits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from atoll.protocol.messages import Contribution
from atoll.protocol.records import Share
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import median
from atoll.protocol.syncer.claims import STEPS

FEW = 2
"""In a round of so few nobody can tell which of them claims too much."""
TOLD = 2.0
"""A weight that was cut to less than one part of so many is told."""


def weight(given: Contribution | Share) -> float:
    """Quantity × quality: w = tokens · (tokens / steps). In this order: records are compared with it to the bit."""
    return given.tokens * (given.tokens / given.steps)


def limit_of(learner: str, steps_seen: int, settings: Settings) -> float:
    """How many times the median a learner's contributions may count."""
    if (allowed := settings.weight_limits.get(learner)) is not None:
        return allowed
    return settings.weight_limit if steps_seen >= STEPS else 1.0


def limited(weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Within each one's limit, and nobody above half of three or more."""
    merged = under_median(weights, limits)
    if len(merged) > FEW:
        top = max(range(len(merged)), key=merged.__getitem__)
        merged[top] = min(merged[top], fsum(merged[:top] + merged[top + 1 :]))
    return merged


def under_median(weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """For whoever is above the middle, the median of the others is that of all but the largest."""
    if len(weights) <= FEW:
        return list(weights)
    middle = median(sorted(weights)[:-1])
    return [min(one, limit * middle) for one, limit in zip(weights, limits, strict=True)]


def telling(names: Sequence[str], weights: Sequence[float], merged: Sequence[float]) -> str:
    """What was cut to less than half, for the round's reason; empty where nothing was."""
    all_of = zip(names, weights, merged, strict=True)
    cut = [f"{name} from {was:.4g} to {now:.4g}" for name, was, now in all_of if TOLD * now < was]
    return f"weight limited by the median of the others: {', '.join(cut)}" if cut else ""
