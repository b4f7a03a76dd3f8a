"""The autocorrelation ρ of merged gradients: the cosine of a fragment's outer gradient and the one before it.

The gradient before is not kept: it would take 4 bytes per parameter. Kept of each fragment is a sketch, a random
projection onto SKETCH numbers, whose dot product with the next one is the cosine, give or take 1/√SKETCH. Of a large
fragment a sample is projected (sample.py), always the same one, so that a round hardly takes longer for it.

Rules kept here: one loop projects, in float64 and in a fixed order, so no bit depends on the number of threads. Merged
buffers do not count: they take no outer step. A gradient without a direction (all zero) has the cosine 0 with any.
"""

from __future__ import annotations

import numpy as np

from atoll.numerics.agreement import sketches
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.sample import draw_sample

SKETCH = 4096
"""Numbers of a sketch: the cosine is known to about 0.016, and its mean over 24 fragments to 0.003."""


class Autocorrelation:
    def __init__(self, plan: FragmentPlan) -> None:
        self._plan = plan
        self._last: dict[int, DoubleArray] = {}
        """By fragment, the sketch of its last gradient."""

    def measure(self, index: int, gradient: FloatArray) -> float | None:
        """ρ of this gradient, which is the fragment's last one from now on; None: it is the first."""
        before, now = self._last.get(index), _sketch(self._plan.fragments[index], gradient)
        self._last[index] = now
        if before is None:
            return None
        return float(np.clip(np.sum(before * now), -1.0, 1.0))


def _sketch(fragment: Fragment, gradient: FloatArray) -> DoubleArray:
    if fragment.buffers.stop > fragment.buffers.start:
        gradient = gradient.copy()
        gradient[fragment.buffers] = 0.0
    (found,) = sketches([gradient], draw_sample(fragment, [fragment.index]), buckets=SKETCH)
    return found
