"""Single tensors of blocks dealt in strides: neighbours in a block go to different fragments."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.numerics.fragments import Bins
from atoll.numerics.plans.layer import deal_strides, find_block
from atoll.protocol.messages import TensorSpec


def deal(tensors: Sequence[TensorSpec], count: int) -> Bins:
    dealt = sorted((block, tensor.name, tensor) for tensor in tensors if (block := find_block(tensor.name)))
    return deal_strides("tensor", "tensors in blocks", tensors, [[tensor] for _, _, tensor in dealt], count)
