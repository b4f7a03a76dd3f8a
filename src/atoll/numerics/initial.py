"""Version 0 in 2 bytes a value: the loss of `initial_codec = "bf16"`, and the form in which such values travel.

The learner that gives version 0 rounds its values once (learner/boundary.py). From then on the rounded values are
version 0, and every encoding here is exact: a fragment with a value that bf16 cannot hold has no such form, and travels
as fp32. So the syncer, the learners and the journal hold the same bits, whichever way these came.

Rules kept here:
- trained parameters of float32 are rounded to the nearest bf16, ties to even: 8 significant bits, an error of at most
  2^-8 of the value;
- parameters of bfloat16 hold such values already. Those of float16 stay as they are, in 4 bytes: rounding the largest
  of them would overflow;
- merged buffers stay as they are, in 4 bytes: they may be counters, or variances that a rounding could make zero.

A body holds the values of 4 bytes first, so that these are aligned, then those of 2 bytes, each in order of the array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.fragments import Fragment
from atoll.protocol.messages import TensorSpec


class WidthRun(NamedTuple):
    """Neighbouring values that travel in one width, and their bytes in a body."""

    values: slice
    data: slice
    halved: bool


def is_halved(tensor: TensorSpec) -> bool:
    """Return whether the values of this tensor travel in 2 bytes each."""
    return not tensor.buffer_rule and tensor.dtype in ("float32", "bfloat16")


def count_initial_bytes(part: Fragment) -> int:
    """Return the length of a body of version 0."""
    return sum((2 if is_halved(piece.tensor) else 4) * piece.size for piece in part.pieces)


def lay_out_initial(part: Fragment) -> list[WidthRun]:
    """Return the runs of a fragment in order of their bytes."""
    joined: list[tuple[bool, slice]] = []
    for piece, place in part.parts:
        halved = is_halved(piece.tensor)
        if joined and joined[-1][0] == halved:
            joined[-1] = (halved, slice(joined[-1][1].start, place.stop))
        else:
            joined.append((halved, place))
    runs, start = [], 0
    for halved, place in sorted(joined, key=lambda run: run[0]):  # stable: each width keeps the array's order
        stop = start + (2 if halved else 4) * (place.stop - place.start)
        runs.append(WidthRun(place, slice(start, stop), halved))
        start = stop
    return runs


def encode_initial(part: Fragment, values: FloatArray) -> ByteArray | None:
    """Return the body of these values. None: bf16 does not hold all of them exactly."""
    data = np.empty(count_initial_bytes(part), np.uint8)
    for run in lay_out_initial(part):
        if not run.halved:
            data[run.data] = values[run.values].view(np.uint8)
            continue
        halves = values[run.values].view(np.uint16)  # little-endian: the lower half of each value comes first
        if halves[0::2].any():
            return None
        data[run.data].view(np.uint16)[:] = halves[1::2]
    return data


def decode_initial(part: Fragment, data: ByteArray, out: FloatArray) -> None:
    """Fill `out` with the values of a body of the right length."""
    assert data.size == count_initial_bytes(part) and out.size == part.size, "the receiver has checked the length"
    for run in lay_out_initial(part):
        if not run.halved:
            out[run.values].view(np.uint8)[:] = data[run.data]
            continue
        halves = out[run.values].view(np.uint16)
        halves[0::2] = 0
        halves[1::2] = data[run.data].view(np.uint16)
