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
from atoll.numerics.merge import add_scaled, norm_of_cuts, row_norms, square_cuts

CANCELLED = 1e-3
"""Directions whose mean is shorter than this cancel: M unrelated ones are 1/√M long, float32 noise about 1e-7."""
SPECK = 1e-30
"""A norm this small beside the mean norm has no direction: scaling it up would leave the range of float32."""


def merges_rows_apart(piece: Piece) -> bool:
    return False


def direction_rows(piece: Piece) -> int:
    return 1


def merge_piece(piece: Piece, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    """Norms are sums over the piece's cuts: merge.py does the same, and so do shards that hold a piece together."""
    norms = np.array([[norm_of_cuts(square_cuts(piece, delta))] for delta in deltas])
    radius, coefficients = weigh_directions(norms, shares)
    add_scaled(deltas, coefficients, out)
    lengthen_sum(deltas, shares, coefficients, radius, np.array([norm_of_cuts(square_cuts(piece, out))]), out)


def merge_rows(deltas: list[FloatArray], shares: DoubleArray, out: FloatArray, rows: int) -> None:
    """Row by row: the mean norm, times the direction of the mean direction."""
    radius, coefficients = weigh_directions(np.stack([row_norms(delta, rows) for delta in deltas]), shares)
    add_scaled(deltas, coefficients, out)
    lengthen_sum(deltas, shares, coefficients, radius, row_norms(out, rows), out)


def weigh_directions(norms: DoubleArray, shares: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """Of ‖Δ‖ by contribution and row: the mean norm of each row, and by contribution and row the coefficients of Δ in
    radius · Σ w φ(Δ) / Σ w, which is about as large as a Δ."""
    radius: DoubleArray = sum(
        (share * norm for share, norm in zip(shares, norms, strict=True)), np.zeros(norms.shape[1])
    )
    toward = np.divide(radius, norms, out=np.zeros_like(norms), where=norms > SPECK * radius)
    return radius, shares[:, np.newaxis] * toward


def lengthen_sum(
    deltas: list[FloatArray],
    shares: DoubleArray,
    coefficients: DoubleArray,
    radius: DoubleArray,
    length: DoubleArray,
    out: FloatArray,
) -> None:
    """`out` is what the coefficients give, so long (`length`) in each row: make it as long as the mean norm. A row
    whose directions cancel becomes the mean."""
    cancelled = length < CANCELLED * radius
    if cancelled.any():
        add_scaled(deltas, np.where(cancelled, shares[:, np.newaxis], coefficients), out)
    factors = np.divide(radius, length, out=np.ones(length.size), where=(length > 0) & ~cancelled)
    kernels.scale_rows(out, read_only(factors.astype(np.float32)))
