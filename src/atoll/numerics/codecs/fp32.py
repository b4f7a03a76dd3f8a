"""As it is: 4 bytes an element."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Delta, check_length, count_values, encode_in_steps
from atoll.numerics.compiled import PART, in_parts
from atoll.numerics.fragments import Rows


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
        given, bytes_each = out.view(np.uint8), 4 * PART
        in_parts(lambda a, b: np.copyto(given[a:b], data[a:b]), data.size, bytes_each, self.threads)


make = Fp32
