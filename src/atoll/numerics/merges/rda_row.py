"""RDA for each row (first dimension) of tensors that have rows; of the others as a whole."""

from __future__ import annotations

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Piece
from atoll.numerics.merges.rda import merge_rows


def merge_piece(piece: Piece, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    merge_rows(deltas, shares, out, piece.rows if len(piece.shape) >= 2 else 1)
