"""What became of the time: goodput, uptime, liveness, tokens, and where the rest went.

goodput is the share of the allocated learner-seconds that were spent on useful steps, a step with fewer slices
counting less; uptime the share of time in which at least one learner stepped; liveness the mean share of learners that
were there and recovered. Hours in which a scavenged learner is away are not allocated. `lost` says where the rest went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from atoll.simulate.goodput.chips import Kind, Stretch

DEAD: frozenset[Kind] = frozenset({"gone", "recovering", "outage"})
STANDING: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in ("stepping", "away"))
LOSSES = ("missing slices", "idle in steps", *STANDING)
"""The first two are lost while stepping."""


class Tally(msgspec.Struct, frozen=True):
    goodput: float
    uptime: float
    liveness: float
    learner_steps: float
    """Useful steps of all learners together, in steps of a whole learner."""
    lost: dict[str, float]
    """By reason, as shares of the allocated time."""


def count(lives: Sequence[Sequence[Stretch]], span_s: float, step_s: float) -> Tally:
    useful = there = allocated = 0.0
    lost = dict.fromkeys(LOSSES, 0.0)
    for stretch in (one for life in lives for one in life):
        seconds = min(stretch.end, span_s) - stretch.start
        if seconds <= 0 or stretch.kind == "away":
            continue
        allocated += seconds
        there += 0.0 if stretch.kind in DEAD else seconds
        if stretch.kind == "stepping":
            useful += seconds * stretch.useful
            lost["missing slices"] += seconds * (1 - stretch.share)
            lost["idle in steps"] += seconds * (stretch.share - stretch.useful)
        else:
            lost[stretch.kind] += seconds
    whole = allocated or 1.0
    return Tally(
        goodput=useful / whole,
        uptime=stepping_s(lives, span_s) / span_s,
        liveness=there / whole,
        learner_steps=useful / step_s,
        lost={reason: seconds / whole for reason, seconds in lost.items() if seconds > 0},
    )


def stepping_s(lives: Sequence[Sequence[Stretch]], span_s: float) -> float:
    """Seconds in which at least one learner stepped."""
    spans = sorted((one.start, one.end) for life in lives for one in life if one.kind == "stepping")
    total = reached = 0.0
    for start, end in spans:
        end = min(end, span_s)
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
