"""As it is: 4 bytes an element."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import codec_kernels, kernels
from atoll.numerics.arrays import ByteArray, FloatArray, IndexArray
from atoll.numerics.codec import BodyGroup, Delta, check_length, count_values, decode_in_parts, encode_in_steps
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
        decode_in_parts(self, data, rows, out, self.threads)

    def decode_runs(self, data: ByteArray, tensor: tuple[int, int], starts: IndexArray, out: FloatArray) -> None:
        codec_kernels.fp32_decode(data.view(np.float32), out, starts)

    def add_bodies(self, group: BodyGroup, tensor: tuple[int, int], start: int, out: FloatArray) -> None:
        values = tuple(body.view(np.float32)[start : start + out.size] for body in group.bodies)
        kernels.accumulate(out, values, group.scales[np.newaxis], group.members, group.fresh)


make = Fp32
