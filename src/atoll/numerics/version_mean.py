"""The mean of some versions of every fragment.

Rules kept here: versions come in order, and a gap leaves the mean incomplete; sums run in float64 in that order,
element by element, and the mean is rounded to float32 once, so equal versions give equal bits. Buffers that a run
averages over its learners (running statistics) are averaged here too: those of the last version would not fit averaged
weights. Buffers that it takes from one learner ("first") are those of the last version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import FragmentPlan


class VersionMeans:
    def __init__(self, plan: FragmentPlan, first: Sequence[int], last: Sequence[int]) -> None:
        """`first`, `last`: of each fragment, the versions that are averaged, both included."""
        self._plan, self._first, self._last = plan, tuple(first), tuple(last)
        self._next = list(first)
        self._sums: list[DoubleArray] = [np.zeros(0)] * len(self._next)

    def add_version(self, fragment: int, version: int, values: FloatArray) -> None:
        """One that is not the next of those that are averaged counts for nothing."""
        if version != self._next[fragment] or version > self._last[fragment]:
            return
        if version == self._first[fragment]:
            self._sums[fragment] = values.astype(np.float64)
        else:
            self._sums[fragment] += values
        if version == self._last[fragment]:
            for piece, place in self._plan.fragments[fragment].parts:
                if piece.tensor.buffer_rule == "first":
                    self._sums[fragment][place] = values[place] * np.float64(self._count(fragment))
        self._next[fragment] += 1

    def is_complete(self) -> bool:
        return all(following > last for following, last in zip(self._next, self._last, strict=True))

    def compute(self) -> list[FloatArray]:
        """Of every fragment."""
        assert self.is_complete(), "every version has come"
        return [(total / self._count(index)).astype(np.float32) for index, total in enumerate(self._sums)]

    def _count(self, fragment: int) -> int:
        return self._last[fragment] - self._first[fragment] + 1
