"""The inner learning rate as a function of the run's progress, so that learners of any speed end it together."""

from __future__ import annotations

import math


def learning_rate(progress: float, peak: float, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Linear up to `peak` over the first `warmup` of the run, then a cosine down to `floor * peak` at its end."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * max(progress / warmup, 0.01)
    fall = (progress - warmup) / (1.0 - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fall)))
