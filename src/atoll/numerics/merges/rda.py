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
from atoll.numerics.merge import add_scaled, row_norms

CANCELLED = 1e-3
"""Directions whose mean is shorter than this cancel: M unrelated ones are 1/√M long, float32 noise about 1e-7."""
SPECK = 1e-30
"""A norm this small beside the mean norm has no direction: scaling it up would leave the range of float32."""


def merges_rows_apart(piece: Piece) -> bool:
    return False


def direction_rows(piece: Piece) -> int:
    return 1


def merge_piece(piece: Piece, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    merge_rows(deltas, shares, out, direction_rows(piece))


def merge_rows(deltas: list[FloatArray], shares: DoubleArray, out: FloatArray, rows: int) -> None:
    """Row by row: the mean norm, times the direction of the mean direction."""
    norms = np.stack([row_norms(delta, rows) for delta in deltas])
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    toward = np.divide(radius, norms, out=np.zeros_like(norms), where=norms > SPECK * radius)
    coefficients = shares[:, np.newaxis] * toward  # of Δ in radius · Σ w φ(Δ) / Σ w, which is about as large as a Δ
    add_scaled(deltas, coefficients, out)
    length = row_norms(out, rows)
    cancelled = length < CANCELLED * radius
    if cancelled.any():
        add_scaled(deltas, np.where(cancelled, shares[:, np.newaxis], coefficients), out)
    factors = np.divide(radius, length, out=np.ones(rows), where=(length > 0) & ~cancelled)
    kernels.scale_rows(out, read_only(factors.astype(np.float32)))
