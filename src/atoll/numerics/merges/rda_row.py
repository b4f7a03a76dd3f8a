"""RDA for each row (first dimension) of tensors that have rows; of the others as a whole."""

from __future__ import annotations

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Piece
from atoll.numerics.merges.rda import merge_rows


def merges_rows_apart(piece: Piece) -> bool:
    return len(piece.shape) >= 2


def direction_rows(piece: Piece) -> int:
    return piece.rows if merges_rows_apart(piece) else 1


def merge_piece(piece: Piece, deltas: FloatArray, shares: DoubleArray, out: FloatArray) -> None:
    merge_rows(deltas, shares, out, direction_rows(piece))
