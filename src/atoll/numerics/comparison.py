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
from atoll.numerics.agreement import BUCKETS, list_pairs, mirror_pairs, norm_sketch
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.deltas import ReadableDelta
from atoll.numerics.fragments import Fragment
from atoll.numerics.merge import Room, cut_fragment
from atoll.numerics.references import draw_references


class Comparison(NamedTuple):
    """Of the contributions to one round, and behind them, where it is asked for, of the outer momentum."""

    norms: DoubleArray
    """[arrays, pieces]."""
    cosines: DoubleArray
    """[arrays, references, pieces]; 1 of a reference with itself."""
    sketches: list[DoubleArray]
    """Of each contribution."""


def measure_cuts(
    fragment: Fragment,
    deltas: Sequence[ReadableDelta],
    momentum: FloatArray | None = None,
    threads: int = 1,
    first: int = 0,
    round: int = 0,
) -> DoubleArray:
    """[cuts, figures]: of each cut the squares of all arrays, their dot products with the references of the round, and
    the sketches of the contributions. `first`: where the values lie in the whole fragment, if they are a shard's part
    of it."""
    cuts, room, members = cut_fragment(fragment), Room(), len(deltas)
    arrays = members + (momentum is not None)
    references = draw_references(arrays, round)
    pairs, compares = list_pairs(arrays, references), arrays * len(references)
    figures = np.zeros((len(cuts), arrays + compares + members * BUCKETS))

    def work(begin: int, end: int) -> None:
        for cut, found in zip(cuts[begin:end], figures[begin:end], strict=True):
            values = [read_only(one) for one in room.read_cut(cut, deltas)]
            compared = values if momentum is None else [*values, read_only(momentum[cut.values])]
            squares, rest = found[:arrays], found[arrays:]
            dots, sketches = rest[:compares].reshape(arrays, -1), rest[compares:]
            for i, one in enumerate(compared):
                kernels.block_dots(one, one, one.size, squares[i : i + 1])
            others = [compared[member] for member in references]
            for i, k in pairs:
                kernels.block_dots(compared[i], others[k], others[k].size, dots[i, k : k + 1])
            for m, one in enumerate(values):
                kernels.sketch(one, sketches[m * BUCKETS : (m + 1) * BUCKETS], first + cut.values.start)

    in_parts(work, len(cuts), 1, threads)
    return figures


def compare_cuts(
    fragment: Fragment, members: int, figures: DoubleArray, round: int = 0, *, with_momentum: bool = False
) -> Comparison:
    """`figures`: of all cuts of the whole fragment, in order."""
    arrays = members + with_momentum
    references = draw_references(arrays, round)
    compares = arrays * len(references)
    numbers = np.array([cut.number for cut in cut_fragment(fragment)])
    of_pieces = [_add_exactly(figures[numbers == n, : arrays + compares]) for n in range(len(fragment.pieces))]
    summed = np.stack(of_pieces, axis=-1)
    norms = np.sqrt(summed[:arrays])
    dots = mirror_pairs(summed[arrays:].reshape(arrays, len(references), -1), references)
    lengths = norms[:, np.newaxis] * norms[references]
    cosines = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
    cosines[references, np.arange(len(references))] = 1.0
    sums = _add_exactly(figures[:, arrays + compares :]).reshape(members, BUCKETS)
    return Comparison(norms, cosines, [norm_sketch(one) for one in sums])


def _add_exactly(figures: DoubleArray) -> DoubleArray:
    """Over the cuts, each sum rounded once."""
    return figures[0] if len(figures) == 1 else np.array([math.fsum(column) for column in figures.T])
