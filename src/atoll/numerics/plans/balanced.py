"""Largest first, each into the lightest fragment; what would make it too heavy is split along its rows.

Rules kept here, for a mean of Σ elements / count:
- a tensor goes whole into the lightest fragment where that stays within 1.1 of the mean. Otherwise as many of its rows
  as fill the fragment to the mean, and the rest is dealt like a tensor of its size;
- so no fragment is above 1.1 of the mean, or above the mean by one row where rows are wider than that;
- a split ends its fragment: no more than count − 1 splits, and no fragment has two pieces of one tensor;
- rows are kept back for fragments that have nothing yet: a model has as many fragments as rows, if asked for.

The numbers are whole, so every machine comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from atoll.numerics.fragments import Bins, Piece, elements, row_count, whole
from atoll.protocol.messages import TensorSpec

PEAK = (11, 10)
"""The most that a fragment of whole tensors is beside the mean."""


def most_fragments(tensors: Sequence[TensorSpec]) -> int:
    return sum(map(row_count, tensors))


def deal(tensors: Sequence[TensorSpec], count: int) -> Bins:
    bins: Bins = [[] for _ in range(count)]
    lightest = [(0, index) for index in range(count)]
    total, rows_left, empty = sum(map(elements, tensors)), most_fragments(tensors), count
    largest = [(-elements(tensor), tensor.name, whole(tensor)) for tensor in tensors]
    heapify(largest)
    while largest:
        _, name, piece = heappop(largest)
        load, index = heappop(lightest)
        rows = _rows_that_fit(piece, load, total, count)
        if empty:  # then this one is
            rows, empty = min(rows, rows_left - empty + 1), empty - 1
        taken, rest = _split(piece, rows)
        bins[index].append(taken)
        heappush(lightest, (load + taken.size, index))
        rows_left -= rows
        if rest is not None:
            heappush(largest, (-rest.size, name, rest))
    return bins


def _rows_that_fit(piece: Piece, load: int, total: int, count: int) -> int:
    """All of them, or those that fill a fragment of this load to the mean: at least one, as the lightest is below."""
    if PEAK[1] * count * (load + piece.size) <= PEAK[0] * total:
        return piece.rows
    width = piece.size // piece.rows
    return min(piece.rows, -(-(total - count * load) // (count * width)))


def _split(piece: Piece, rows: int) -> tuple[Piece, Piece | None]:
    if rows == piece.rows:
        return piece, None
    return Piece(piece.tensor, piece.first, rows), Piece(piece.tensor, piece.first + rows, piece.rows - rows)
