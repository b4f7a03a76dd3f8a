"""Whom the contributions to a round are compared with: all of them, in a large round a sample.

Rules kept here: comparing each with each would cost more per learner the more there are, so in a round of more than
`MOST` members each is compared with `MOST` that are drawn from the round's number; a replay, and every shard of a
syncer, draws the same. Nobody is compared with itself. A median of even numbers is the mean of the middle two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import DoubleArray, IndexArray

MOST = 64
Mask = NDArray[np.bool_]


def draw_references(members: int, round: int) -> IndexArray:
    """The members that all are compared with, in order."""
    if members <= MOST:
        return np.arange(members)
    return np.sort(np.argsort(_mix(np.uint64(round), members), kind="stable")[:MOST])


def _mix(seed: np.uint64, count: int) -> NDArray[np.uint64]:
    """As many numbers, whatever the version of numpy: splitmix64."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64) + seed * np.uint64(count)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def find_others(members: int, references: IndexArray) -> Mask:
    """[M, references]: which references each member is compared with."""
    return np.asarray(np.arange(members)[:, np.newaxis] != references)


def median_of_counted(figures: DoubleArray, counted: Mask) -> DoubleArray:
    """[M, …]: the median of the figures [M, references, …] that count for each; NaN where none does."""
    shape = counted.shape + (1,) * (figures.ndim - 2)
    ordered = np.sort(np.where(counted.reshape(shape), figures, np.inf), axis=1)
    counts = counted.sum(axis=1)
    below, above = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, figures.shape[1] - 1)
    rows = np.arange(len(figures))
    middle = (ordered[rows, below] + ordered[rows, above]) / 2
    return np.asarray(np.where((counts > 0).reshape(-1, *(1,) * (middle.ndim - 1)), middle, np.nan))
