"""As it is: 4 bytes an element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import Delta, add_decoded, check_length, count_values, encode_in_steps, grouped
from atoll.numerics.fragments import Rows
from atoll.numerics.kernels import PART, in_parts, read_only


class Fp32(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "fp32"
    needs_feedback: ClassVar[bool] = False
    threads: int = 1

    def nbytes(self, rows: Rows) -> int:
        return 4 * count_values(rows)

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None:
        np.copyto(out.view(np.float32), values)

    def encode_delta(self, delta: Delta, rows: Rows, out: ByteArray) -> None:
        if delta.has_feedback:
            encode_in_steps(self, delta, rows, out)
        else:
            np.subtract(delta.base, delta.theta, out=out.view(np.float32))

    def check(self, data: ByteArray, rows: Rows) -> None:
        check_length(self, data, rows)

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        np.copyto(out.view(np.uint8), data)

    def add_scaled(self, bodies: Sequence[ByteArray], rows: Rows, coefficients: DoubleArray, out: FloatArray) -> None:
        given, start = [read_only(body).view(np.float32) for body in bodies], 0
        if not all(one.flags.aligned for one in given):  # behind buffers: the kernels know aligned arrays only
            add_decoded(self, bodies, rows, coefficients, out)
            return
        for n, (count, width) in enumerate(rows):
            values = slice(start, start + count * width)
            for group in grouped([one[values] for one in given], coefficients[:, n]):
                in_parts(partial(_add_part, *group, out[values]), count * width, PART, self.threads)
            start = values.stop


make = Fp32


def _add_part(
    deltas: tuple[FloatArray, ...],
    scales: FloatArray,
    members: int,
    fresh: bool,
    out: FloatArray,
    first: int,
    last: int,
) -> None:
    part = tuple(delta[first:last] for delta in deltas)
    kernels.accumulate(out[first:last], part, scales[np.newaxis, :], members, fresh)
