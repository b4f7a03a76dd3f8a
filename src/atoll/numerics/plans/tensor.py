"""Single tensors of blocks dealt in strides: neighbours in a block go to different fragments. None is split."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.numerics.fragments import Bins
from atoll.numerics.plans.layer import Units, deal_strides, find_block
from atoll.protocol.messages import TensorSpec


def most_fragments(tensors: Sequence[TensorSpec]) -> int:
    inside = len(_units(tensors))
    return 1 + inside if inside < len(tensors) else 1


def deal(tensors: Sequence[TensorSpec], count: int) -> Bins:
    return deal_strides("tensor", "tensors in blocks", tensors, _units(tensors), count)


def _units(tensors: Sequence[TensorSpec]) -> Units:
    dealt = sorted((block, tensor.name, tensor) for tensor in tensors if (block := find_block(tensor.name)))
    return [[tensor] for _, _, tensor in dealt]
