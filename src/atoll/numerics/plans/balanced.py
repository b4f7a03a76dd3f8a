"""Largest first, each into the lightest fragment: the peak is at most 4/3 of the best possible."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.numerics.fragments import Bins, elements
from atoll.protocol.messages import TensorSpec


def deal(tensors: Sequence[TensorSpec], count: int) -> Bins:
    bins: Bins = [[] for _ in range(count)]
    loads = [0] * count
    for tensor in sorted(tensors, key=lambda tensor: (-elements(tensor), tensor.name)):
        lightest = loads.index(min(loads))
        bins[lightest].append(tensor)
        loads[lightest] += elements(tensor)
    return bins
