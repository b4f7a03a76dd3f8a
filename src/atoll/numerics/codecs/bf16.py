"""The upper half of a float32, rounded to nearest even: 2 bytes an element."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import ByteArray, FloatArray, HalfBits
from atoll.numerics.codec import check_length


class Bf16(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "bf16"

    def nbytes(self, size: int) -> int:
        return 2 * size

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        kernels.bf16_encode(kernels.read_only(values), _halves(out, values))

    def encode_delta(self, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
        assert base.shape == theta.shape, "both are one whole fragment"
        kernels.bf16_encode_delta(kernels.read_only(base), kernels.read_only(theta), _halves(out, base))

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        check_length(self, data, out)
        kernels.bf16_decode(kernels.read_only(data).view(np.uint16), out.view(np.uint32))


make = Bf16


def _halves(out: ByteArray, values: FloatArray) -> HalfBits:
    halves = out.view(np.uint16)
    assert halves.shape == values.shape, "the buffer is as long as the codec says"
    return halves
