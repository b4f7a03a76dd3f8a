"""As it is: 4 bytes an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import add_decoded, check_length, count_values, encode_in_steps
from atoll.numerics.fragments import Rows


class Fp32(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "fp32"
    threads: int = 1

    def nbytes(self, rows: Rows) -> int:
        return 4 * count_values(rows)

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None:
        np.copyto(out.view(np.float32), values)

    def encode_delta(
        self,
        base: FloatArray,
        theta: FloatArray,
        rows: Rows,
        out: ByteArray,
        feedback: FloatArray | None = None,
        rest: FloatArray | None = None,
    ) -> None:
        if feedback is None and rest is None:
            np.subtract(base, theta, out=out.view(np.float32))
        else:
            encode_in_steps(self, base, theta, rows, out, feedback, rest)

    def check(self, data: ByteArray, rows: Rows) -> None:
        check_length(self, data, rows)

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        np.copyto(out.view(np.uint8), data)

    def add_scaled(self, bodies: Sequence[ByteArray], rows: Rows, coefficients: DoubleArray, out: FloatArray) -> None:
        add_decoded(self, bodies, rows, coefficients, out)


make = Fp32
