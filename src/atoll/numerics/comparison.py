"""How far whole contributions to a round agree, from figures of the cuts of their fragment (`merge.cut_fragment`).

Rules kept here: a cut is measured by itself, in float64, and sums over cuts are exact (`fsum`). So no bit depends on
the number of threads, nor on how many shards of a syncer (docs/adr/0031) measured a part of the fragment each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atoll.numerics import kernels
from atoll.numerics.agreement import BUCKETS, norm_sketch
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.deltas import ReadableDelta
from atoll.numerics.fragments import Fragment
from atoll.numerics.merge import Room, cut_fragment


class Comparison(NamedTuple):
    """Of the contributions to one round, and behind them, where it is asked for, of the outer momentum."""

    norms: DoubleArray
    """[arrays, pieces]."""
    cosines: DoubleArray
    """[arrays, arrays, pieces]; 1 on the diagonal."""
    sketches: list[DoubleArray]
    """Of each contribution."""


def measure_cuts(
    fragment: Fragment,
    deltas: Sequence[ReadableDelta],
    momentum: FloatArray | None = None,
    threads: int = 1,
    first: int = 0,
) -> DoubleArray:
    """[cuts, figures]: of each cut the dot products of all pairs, and the sketches of the contributions. `first`: where
    the values lie in the whole fragment, if they are a shard's part of it."""
    cuts, room, members = cut_fragment(fragment), Room(), len(deltas)
    arrays = members + (momentum is not None)
    figures = np.zeros((len(cuts), arrays * arrays + members * BUCKETS))

    def work(begin: int, end: int) -> None:
        for cut, found in zip(cuts[begin:end], figures[begin:end], strict=True):
            values = [read_only(one) for one in room.read_cut(cut, deltas)]
            compared = values if momentum is None else [*values, read_only(momentum[cut.values])]
            dots, sketches = found[: arrays * arrays].reshape(arrays, arrays), found[arrays * arrays :]
            for i, one in enumerate(compared):
                for j, other in enumerate(compared[: i + 1]):
                    kernels.block_dots(one, other, one.size, dots[i, j : j + 1])
            for m, one in enumerate(values):
                kernels.sketch(one, sketches[m * BUCKETS : (m + 1) * BUCKETS], first + cut.values.start)

    in_parts(work, len(cuts), 1, threads)
    return figures


def compare_cuts(fragment: Fragment, members: int, figures: DoubleArray) -> Comparison:
    """`figures`: of all cuts of the whole fragment, in order."""
    arrays = math.isqrt(figures.shape[1] - members * BUCKETS)
    numbers = np.array([cut.number for cut in cut_fragment(fragment)])
    of_pieces = [_add_exactly(figures[numbers == n, : arrays * arrays]) for n in range(len(fragment.pieces))]
    dots = np.stack(of_pieces, axis=-1).reshape(arrays, arrays, -1)
    norms = np.sqrt(dots[range(arrays), range(arrays)])
    lengths = norms[:, np.newaxis] * norms
    found = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    lower = found * np.tri(arrays, k=-1)[:, :, np.newaxis]
    cosines = lower + lower.transpose(1, 0, 2) + np.eye(arrays)[:, :, np.newaxis]
    sums = _add_exactly(figures[:, arrays * arrays :]).reshape(members, BUCKETS)
    return Comparison(norms, cosines, [norm_sketch(one) for one in sums])


def _add_exactly(figures: DoubleArray) -> DoubleArray:
    """Over the cuts, each sum rounded once."""
    return figures[0] if len(figures) == 1 else np.array([math.fsum(column) for column in figures.T])
