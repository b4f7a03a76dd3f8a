"""How far contributions to one round agree: per tensor, the cosine of every pair; and a sketch of each over time.

Rules kept here: sums run in float64 over fixed lanes and blocks, so equal inputs give equal bits for any number of
threads; a contribution without a direction (all zero) agrees with nobody, its cosines are 0.

Learners that train the same model on the same kind of data agree a little: over 24 steps the cosine of two of them is
0.5 early in a run and 0.05 late, per tensor it may be below 0 by chance (about 1/√elements). The median over the others
is the measure, because fewer than half of them cannot move it, also if they agree with each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Fragment

BUCKETS = 256
"""Numbers in a sketch: the cosine of two sketches is that of the contributions, give or take 1/√256."""


def tensor_norms(fragment: Fragment, deltas: Sequence[FloatArray]) -> DoubleArray:
    """‖Δ‖ by contribution, then tensor."""
    norms = np.empty((len(deltas), len(fragment.pieces)))
    square = np.empty(1, np.float64)
    for m, delta in enumerate(deltas):
        for n, (_, part) in enumerate(fragment.parts):
            kernels.square_norms(kernels.read_only(delta[part]), square)
            norms[m, n] = np.sqrt(square[0])
    return norms


def pair_cosines(fragment: Fragment, deltas: Sequence[FloatArray], norms: DoubleArray) -> DoubleArray:
    """[M, M, tensors]: the cosine of each pair of contributions, in each tensor; 1 on the diagonal."""
    members = len(deltas)
    cosines = np.ones((members, members, len(fragment.pieces)))
    for n, (_, part) in enumerate(fragment.parts):
        views = [kernels.read_only(delta[part]) for delta in deltas]
        dots = np.zeros((members, members))
        for start in range(0, part.stop - part.start, kernels.BLOCK):  # every pair while they are in cache
            blocks = [view[start : start + kernels.BLOCK] for view in views]
            for i in range(members):
                for j in range(i):
                    dots[i, j] += kernels.dot(blocks[i], blocks[j])
        lengths = np.outer(norms[:, n], norms[:, n])
        found = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
        lower = np.tril(found, -1)
        cosines[:, :, n] = lower + lower.T + np.eye(members)
    return cosines


def cosine_with(fragment: Fragment, delta: FloatArray, norms: DoubleArray, other: FloatArray) -> DoubleArray:
    """Per tensor, the cosine of one contribution with an array of the same fragment."""
    found, square = np.zeros(len(fragment.pieces)), np.empty(1, np.float64)
    for n, (_, part) in enumerate(fragment.parts):
        there = kernels.read_only(other[part])
        kernels.square_norms(there, square)
        length = norms[n] * np.sqrt(square[0])
        if length > 0:
            found[n] = kernels.dot(kernels.read_only(delta[part]), there) / length
    return found


def median_of_others(cosines: DoubleArray) -> DoubleArray:
    """[M, tensors]: the median cosine of each contribution with the others. Of fewer than two members there is none."""
    members = len(cosines)
    others = np.stack([np.delete(cosines[m], m, axis=0) for m in range(members)])
    return np.asarray(np.median(others, axis=1))


def by_size(fragment: Fragment, figures: DoubleArray) -> DoubleArray:
    """The mean over the tensors (the last axis), each as much as it has elements: large ones have less noise."""
    sizes = np.array([piece.size for piece in fragment.pieces], np.float64)
    return np.asarray(figures @ (sizes / sizes.sum()))


def sketch(delta: FloatArray) -> DoubleArray:
    """A contribution's direction in few numbers, of length 1 (or 0): to tell whether it was given before."""
    out = np.zeros(BUCKETS)
    kernels.sketch(kernels.read_only(delta), out)
    length = float(np.sqrt(np.sum(out * out)))
    return out / length if 0 < length < np.inf else np.zeros(BUCKETS)
