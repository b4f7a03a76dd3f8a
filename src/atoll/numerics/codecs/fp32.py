"""As it is: 4 bytes an element."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import check_length


class Fp32(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "fp32"

    def nbytes(self, size: int) -> int:
        return 4 * size

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        np.copyto(out.view(np.float32), values)

    def encode_delta(self, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
        np.subtract(base, theta, out=out.view(np.float32))

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        check_length(self, data, out)
        np.copyto(out.view(np.uint8), data)


make = Fp32
