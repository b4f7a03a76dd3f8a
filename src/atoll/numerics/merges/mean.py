"""The weighted mean: Σ w Δ / Σ w."""

from __future__ import annotations

from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.merge import take_mean
from atoll.protocol.messages import TensorSpec


def merge_tensor(tensor: TensorSpec, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    take_mean(deltas, shares, out)
