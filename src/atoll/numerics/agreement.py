"""How far gradients agree: contributions to one round, per tensor and pair; a contribution and the learner's last one;
and a fragment's merged gradient and the one before it (the autocorrelation ρ).

Rules kept here: sums run in float64 over fixed lanes and blocks, so equal inputs give equal bits for any number of
threads; what has no direction (all zero) agrees with nothing, its cosines are 0.

Learners that train the same model on the same kind of data agree a little: over 24 steps the cosine of two of them is
0.5 early in a run and 0.05 late, per tensor it may be below 0 by chance (about 1/√elements). The median over the others
is the measure, because fewer than half of them cannot move it, also if they agree with each other.

Gradients of earlier rounds are not kept: each would take 4 bytes per parameter. Kept is a sketch, a random projection
onto few numbers, whose dot product with the next one is the cosine, give or take 1/√numbers. Of a large fragment a
sample is projected (sample.py), always the same one, so that a round hardly takes longer for it. In ρ, merged buffers
do not count: they take no outer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray, IndexArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.sample import draw_sample

BLOCKS = 2
"""Of values that one thread compares at a time."""
BUCKETS = 256
"""Numbers in a sketch of a contribution: the cosine of two is that of the contributions, give or take 1/√256."""
GRADIENT_BUCKETS = 4096
"""Numbers in a sketch of a merged gradient: ρ is known to about 0.016, and its mean over 24 fragments to 0.003."""


def tensor_norms(parts: Sequence[slice], deltas: Sequence[FloatArray], threads: int = 1) -> DoubleArray:
    """‖Δ‖ by contribution, then tensor. `parts`: where the values of each tensor lie."""
    squares = np.empty((len(deltas), len(parts), 1))

    def work(first: int, _: int) -> None:
        m, n = divmod(first, len(parts))
        kernels.square_norms(read_only(deltas[m][parts[n]]), squares[m, n])

    in_parts(work, len(deltas) * len(parts), 1, threads)
    return np.sqrt(squares[:, :, 0])


def pair_cosines(
    parts: Sequence[slice],
    deltas: Sequence[FloatArray],
    norms: DoubleArray,
    references: IndexArray,
    threads: int = 1,
) -> DoubleArray:
    """[M, references, tensors]: the cosine of each contribution with each reference, in each tensor; 1 with itself."""
    cosines = np.empty((len(deltas), len(references), len(parts)))
    for n, part in enumerate(parts):
        dots = _pair_dots([read_only(delta[part]) for delta in deltas], references, threads)
        lengths = np.outer(norms[:, n], norms[references, n])
        cosines[:, :, n] = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    cosines[references, np.arange(len(references))] = 1.0
    return cosines


def list_pairs(members: int, references: IndexArray) -> list[tuple[int, int]]:
    """Member and place of the reference, each pair once, none of a member with itself; `mirror_pairs` has the rest."""
    places = {int(member): place for place, member in enumerate(references)}
    return [(m, k) for m in range(members) for k in range(places.get(m, len(references)))]


def mirror_pairs(dots: DoubleArray, references: IndexArray) -> DoubleArray:
    """[M, references, …], with the pairs of two references filled in that `list_pairs` has the other way round."""
    among = dots[references]
    lower = among * np.tri(len(references), k=-1).reshape(len(references), -1, *(1,) * (dots.ndim - 2))
    dots[references] = lower + lower.swapaxes(0, 1)
    return dots


def _pair_dots(deltas: list[FloatArray], references: IndexArray, threads: int) -> DoubleArray:
    """[M, references]."""
    members, blocks = len(deltas), -(-deltas[0].size // kernels.BLOCK)
    found = np.zeros((members, len(references), blocks))
    pairs = list_pairs(members, references)

    def work(first: int, last: int) -> None:
        """Every pair while they are in cache."""
        cut = [delta[first * kernels.BLOCK : last * kernels.BLOCK] for delta in deltas]
        others = [cut[member] for member in references]
        for m, k in pairs:
            kernels.block_dots(cut[m], others[k], kernels.BLOCK, found[m, k, first:last])

    in_parts(work, blocks, BLOCKS, threads)
    dots = np.zeros((members, len(references)))
    for k in range(blocks):
        dots += found[:, :, k]
    return mirror_pairs(dots, references)


def cosines_with(
    parts: Sequence[slice], deltas: Sequence[FloatArray], norms: DoubleArray, other: FloatArray, threads: int = 1
) -> DoubleArray:
    """By contribution, then tensor: the cosine with an array of the same values."""
    dots = np.empty((len(deltas), len(parts), 1))

    def work(first: int, _: int) -> None:
        m, n = divmod(first, len(parts))
        here, there = (read_only(values[parts[n]]) for values in (deltas[m], other))
        kernels.block_dots(here, there, here.size, dots[m, n])

    in_parts(work, len(deltas) * len(parts), 1, threads)
    lengths = norms * tensor_norms(parts, [other], threads)
    return np.divide(dots[:, :, 0], lengths, out=np.zeros_like(lengths), where=lengths > 0)


def by_size(fragment: Fragment, figures: DoubleArray) -> DoubleArray:
    """The mean over the tensors (the last axis), each as much as it has elements: large ones have less noise."""
    sizes = np.array([piece.size for piece in fragment.pieces], np.float64)
    return np.asarray(figures @ (sizes / sizes.sum()))


def sketches(taken: Sequence[FloatArray], threads: int = 1, buckets: int = BUCKETS) -> list[DoubleArray]:
    """Each contribution's direction in few numbers, of length 1 (or 0): to tell whether it was given before. `taken`:
    of each the same sample, by which it is compared with its learner's last one."""
    sums = np.zeros((len(taken), buckets))
    in_parts(lambda m, _: kernels.sketch(read_only(taken[m]), sums[m], 0), len(taken), 1, threads)
    return [norm_sketch(one) for one in sums]


def norm_sketch(sums: DoubleArray) -> DoubleArray:
    """Of length 1; of what has no direction, zero."""
    length = float(np.sqrt(np.sum(sums * sums)))
    return sums / length if 0 < length < np.inf else np.zeros_like(sums)


class Autocorrelation:
    def __init__(self, plan: FragmentPlan) -> None:
        self._plan = plan
        self._last: dict[int, DoubleArray] = {}
        """By fragment, the sketch of its last merged gradient."""

    def measure(self, index: int, gradient: FloatArray) -> float | None:
        """ρ of this gradient, which is the fragment's last one from now on; None: it is the first."""
        before, now = self._last.get(index), _sketch_gradient(self._plan.fragments[index], gradient)
        self._last[index] = now
        if before is None:
            return None
        return float(np.clip(np.sum(before * now), -1.0, 1.0))


def _sketch_gradient(fragment: Fragment, gradient: FloatArray) -> DoubleArray:
    if fragment.buffers.stop > fragment.buffers.start:
        gradient = gradient.copy()
        gradient[fragment.buffers] = 0.0
    taken = draw_sample(fragment, [fragment.index]).take(gradient)
    (found,) = sketches([taken], buckets=GRADIENT_BUCKETS)
    return found
