"""Whether two values are the same to the bit: types, order of keys, signs of zero and payloads of NaN included; and
whole snapshots to compare."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from atoll.learner.snapshot import Snapshot
from atoll.learner.state import begin_capture


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
    if isinstance(one, np.ndarray | np.generic) and isinstance(other, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict) and isinstance(other, dict):
        return same([[*pair] for pair in one.items()], [[*pair] for pair in other.items()])
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def capture(*things: Any, **options: Any) -> Snapshot:
    """Once its copies are made."""
    return begin_capture(*things, **options).finish()
