"""What a contribution weighs in a merge: w = tokens · (tokens / steps), within limits.

Rules kept here, each with its test:
- a weight is at most its limit times the median of all weights but the largest. The limit is 1 until this syncer
  process has seen `KNOWN_STEPS` steps of the learner's present life, then `weight_limit` (2). What the operator set for
  this learner (`weight_limits`) comes first;
- in a round of three or more, nobody has more than half, whatever is set;
- weights within these limits stay as they are, to the bit; rounds of one or two have no limit.

So one of n equal learners has at most 2 / (n + 1) of a round, whatever it claims, and a minority gains nothing by
claiming it together. A learner with 1.4 times the others' tokens per step reaches the limit, since w grows with their
square: allow it more with `weight_limits`.

These weights go to the merge, which divides by their sum. With `robust` a filter (numerics/filter.py) may still shorten
single tensors of a contribution or leave them out (`Share.factors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from atoll.protocol.messages import Contribution
from atoll.protocol.records import Share
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import median_of_sorted
from atoll.protocol.syncer.claims import KNOWN_STEPS

FEW = 2
"""In a round of so few nobody can tell which of them claims too much."""
REPORT_LIMITED_RATIO = 2.0
"""A weight that is over this many times what was left of it is named in the round's reason."""


def weight(given: Contribution | Share) -> float:
    """w = tokens · (tokens / steps), computed in this order: `atoll verify` compares records with it to the bit
    (store/audit_members.py)."""
    return given.tokens * (given.tokens / given.steps)


def limit_of(learner: str, steps_seen: int, settings: Settings) -> float:
    """How many times the median a learner's contributions may count."""
    if (allowed := settings.weight_limits.get(learner)) is not None:
        return allowed
    return settings.weight_limit if steps_seen >= KNOWN_STEPS else 1.0


def limit_weights(weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Within each one's limit, and nobody above half of three or more."""
    capped = _under_median(weights, limits)
    if len(capped) > FEW:
        top = max(range(len(capped)), key=capped.__getitem__)
        capped[top] = min(capped[top], fsum(capped[:top] + capped[top + 1 :]))
    return capped


def _under_median(weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Each limited to its limit times the median of all but the largest."""
    if len(weights) <= FEW:
        return list(weights)
    middle = median_of_sorted(sorted(weights)[:-1])
    return [min(one, limit * middle) for one, limit in zip(weights, limits, strict=True)]


def describe_limited(names: Sequence[str], weights: Sequence[float], capped: Sequence[float]) -> str:
    """The weights that were limited to less than half, for the round's reason; empty if there are none."""
    all_of = zip(names, weights, capped, strict=True)
    told = [f"{name} from {was:.4g} to {now:.4g}" for name, was, now in all_of if REPORT_LIMITED_RATIO * now < was]
    return f"weight limited by the median of the others: {', '.join(told)}" if told else ""
