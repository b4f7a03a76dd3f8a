"""RDA for each piece: the mean norm in the mean direction, (Σ w‖Δ‖ / Σ w) · φ(Σ w φ(Δ)),  φ(x) = x/‖x‖, φ(0) = 0.

Learners' outer gradients are nearly orthogonal, so a mean shrinks like 1/√M; RDA keeps their norm. What has no common
direction, because the directions cancel, is merged by the mean.

Of a tensor that is split every piece has its own norm and direction: pieces are merged in different rounds, with other
members and weights, so there is no moment at which the whole tensor could be measured.
"""

from __future__ import annotations

import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import read_only
from atoll.numerics.fragments import Piece
from atoll.numerics.merge import add_scaled, norm_of_cuts, square_cuts, take_mean


def merges_rows_apart(piece: Piece) -> bool:
    return False


def direction_rows(piece: Piece) -> int:
    return 1


def merge_piece(piece: Piece, deltas: FloatArray, shares: DoubleArray, out: FloatArray) -> None:
    """Norms are sums over the piece's cuts: merge.py does the same, and so do shards that hold a piece together."""
    norms = np.array([norm_of_cuts(square_cuts(piece, delta)) for delta in deltas])
    radius, coefficients = weigh_directions(norms, shares)
    add_scaled(deltas, coefficients, out)
    length = norm_of_cuts(square_cuts(piece, out))
    if directions_cancel(radius, length):
        take_mean(deltas, shares, out)
    else:
        lengthen_sum(radius, length, out)


def merge_rows(deltas: FloatArray, shares: DoubleArray, out: FloatArray, rows: int) -> None:
    """Row by row: the mean norm, times the direction of the mean direction."""
    kernels.merge_directions(read_only(deltas), read_only(shares), out, rows)


def weigh_directions(norms: DoubleArray, shares: DoubleArray) -> tuple[float, DoubleArray]:
    """Of ‖Δ‖ of each contribution: the mean norm, and the coefficients of Δ in that times Σ w φ(Δ) / Σ w."""
    coefficients = np.empty_like(norms)
    return kernels.weigh_directions(norms.copy(), read_only(shares), coefficients), coefficients


def directions_cancel(radius: float, length: float) -> bool:
    """`length`: of the sum that the coefficients gave. The mean is taken instead."""
    return length < kernels.CANCELLED * radius


def lengthen_sum(radius: float, length: float, out: FloatArray) -> None:
    """`out` is so long: make it as long as the mean norm."""
    factor = np.array([radius / length if length > 0 else 1.0], np.float32)
    kernels.scale_rows(out, read_only(factor))
