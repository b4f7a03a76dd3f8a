"""The weighted mean: Σ w Δ / Σ w."""

from __future__ import annotations

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Piece
from atoll.numerics.merge import take_mean


def merges_rows_apart(piece: Piece) -> bool:
    return True


def direction_rows(piece: Piece) -> int:
    return 0


def merge_piece(piece: Piece, deltas: FloatArray, shares: DoubleArray, out: FloatArray) -> None:
    take_mean(deltas, shares, out)
