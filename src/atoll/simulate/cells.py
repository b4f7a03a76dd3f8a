"""A fragment of several values, where one number is not enough: who holds which of them matters.

`Cells` stands wherever a world has one number for a fragment. It is a float (the sum of its values, so that a NaN
shows) that adds and multiplies value by value. `CellModel` is a model of one tensor for each fragment, and the boxes
that the ranks of a learner hold of them, by the product's own plans.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan, Piece, lay_out_plan
from atoll.numerics.rank_plan import RankPlan, check_tiling, make_rank_plans
from atoll.protocol.messages import Box, RankBoxes, TensorSpec

ROWS, COLUMNS = 4, 3
SIZE = ROWS * COLUMNS
RankSplit = Literal["rows", "columns", "replicas"]
"""How ranks share a tensor: as FSDP does, as tensor parallel does, or each has all of it (DDP)."""
LAYOUTS: tuple[RankSplit, ...] = get_args(RankSplit)


class Cells(float):
    """Values that never change."""

    values: FloatArray

    def __new__(cls, values: FloatArray) -> Cells:
        made = super().__new__(cls, float(values.sum()))
        made.values = values
        return made

    def __add__(self, other: float) -> Cells:
        return Cells(self.values + _plain(other))

    def __radd__(self, other: float) -> Cells:
        return Cells(_plain(other) + self.values)

    def __sub__(self, other: float) -> Cells:
        return Cells(self.values - _plain(other))

    def __rsub__(self, other: float) -> Cells:
        return Cells(_plain(other) - self.values)

    def __mul__(self, other: float) -> Cells:
        return Cells(self.values * _plain(other))

    def __rmul__(self, other: float) -> Cells:
        return Cells(_plain(other) * self.values)

    def __truediv__(self, other: float) -> Cells:
        return Cells(self.values / _plain(other))

    def __abs__(self) -> float:
        """The largest: how far apart two are is how far their values are."""
        return float(np.abs(self.values).max())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cells) and bool(np.array_equal(self.values, other.values))

    def __ne__(self, other: object) -> bool:  # float has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    def __repr__(self) -> str:
        return f"[{' '.join(f'{value:.6g}' for value in self.values)}]"


def _plain(other: float) -> FloatArray | float:
    return other.values if isinstance(other, Cells) else float(other)


def begin_cells() -> Cells:
    """Version 0 of a fragment: no two values are equal."""
    return Cells(_doubles(1.0 + np.arange(SIZE)))


def constant_gradient(t: int) -> Cells:
    """No two values move equally."""
    return _GRADIENT


def _doubles(values: object) -> FloatArray:
    """The product's arrays are of float32. Here sums of many steps are to be exact."""
    return np.asarray(values, dtype=np.float64)


_GRADIENT = Cells(_doubles(1.0 + 0.25 * np.arange(SIZE)))


class CellModel:
    """One tensor of SIZE values for each fragment."""

    def __init__(self, fragments: int) -> None:
        self.tensors = tuple(TensorSpec(f"fragment{number}", (ROWS, COLUMNS), "float32") for number in range(fragments))
        self.plan: FragmentPlan = lay_out_plan("balanced", [[Piece(one, 0, ROWS)] for one in self.tensors])

    def make_boxes(self, ranks: int, layout: RankSplit) -> tuple[RankBoxes, ...]:
        """In order of rank. Tensors take turns in whose part comes first: no rank has the largest part of all."""
        boxes = []
        for rank in range(ranks):
            sends = layout != "replicas" or rank == 0
            places = [_place(layout, ranks, (rank + number) % ranks) for number in range(len(self.tensors))]
            boxes.append(
                tuple(Box(tensor.name, *place, sends) for tensor, place in zip(self.tensors, places, strict=True))
            )
        check_tiling(self.tensors, boxes)
        return tuple(boxes)

    def make_plans(self, boxes: tuple[RankBoxes, ...]) -> tuple[RankPlan, ...]:
        return make_rank_plans(self.plan, boxes)


def _split(length: int, parts: int, part: int) -> tuple[int, int]:
    """Where a part begins, and how long it is; of more parts than values some are empty."""
    each = -(-length // parts)
    start = min(part * each, length)
    return start, min(each, length - start)


def _place(layout: RankSplit, ranks: int, part: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Offsets and sizes."""
    if layout == "replicas":
        return (0, 0), (ROWS, COLUMNS)
    start, size = _split(ROWS if layout == "rows" else COLUMNS, ranks, part)
    return ((start, 0), (size, COLUMNS)) if layout == "rows" else ((0, start), (ROWS, size))


def take_part(plan: RankPlan, fragment: int, whole: Cells) -> Cells:
    """What a rank holds of it."""
    local = _doubles(np.empty(plan.plan.fragments[fragment].size))
    plan.take(fragment, whole.values, local)
    return Cells(local)


def join_parts(plans: tuple[RankPlan, ...], fragment: int, sent: dict[int, Cells]) -> Cells:
    """The whole, of what each rank sends of it. What nobody sent is NaN."""
    whole = _doubles(np.full(SIZE, np.nan))
    for rank, part in sent.items():
        plans[rank].scatter(fragment, part.values, whole)
    return Cells(whole)


def front_of(plan: RankPlan, fragment: int, part: Cells) -> Cells:
    """Of what a rank holds, what it sends."""
    return Cells(part.values[: plan.sent(fragment).size])
