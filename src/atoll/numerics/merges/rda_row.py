"""RDA for each row (first dimension) of tensors that have rows; of the others as a whole."""

from __future__ import annotations

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.merges.rda import merge_rows
from atoll.protocol.messages import TensorSpec


def merge_tensor(tensor: TensorSpec, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    merge_rows(deltas, shares, out, tensor.shape[0] if len(tensor.shape) >= 2 else 1)
