"""The upper half of a float32, rounded to nearest even: 2 bytes an element."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import codec_kernels, group_kernels
from atoll.numerics.arrays import ByteArray, FloatArray, HalfBits, IndexArray
from atoll.numerics.codec import BodyGroup, Delta, check_length, count_values, decode_in_parts, encode_in_steps
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.fragments import Rows


class Bf16(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "bf16"
    needs_feedback: ClassVar[bool] = False
    threads: int = 1

    def nbytes(self, rows: Rows) -> int:
        return 2 * count_values(rows)

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None:
        given, halves = read_only(values), _halves(out, values)
        in_parts(lambda a, b: codec_kernels.bf16_encode(given[a:b], halves[a:b]), given.size, PART, self.threads)

    def encode_delta(self, delta: Delta, rows: Rows, out: ByteArray) -> None:
        if delta.has_feedback:
            encode_in_steps(self, delta, rows, out)
            return
        base, theta, _, _ = delta.as_inputs()
        halves = _halves(out, base)

        def work(a: int, b: int) -> None:
            codec_kernels.bf16_encode_delta(base[a:b], theta[a:b], halves[a:b])

        in_parts(work, base.size, PART, self.threads)

    def check(self, data: ByteArray, rows: Rows) -> None:
        check_length(self, data, rows)

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        decode_in_parts(self, data, rows, out, self.threads)

    def decode_runs(self, data: ByteArray, tensor: tuple[int, int], starts: IndexArray, out: FloatArray) -> None:
        codec_kernels.bf16_decode(data.view(np.uint16), out.view(np.uint32), starts)

    def add_bodies(self, group: BodyGroup, tensor: tuple[int, int], start: int, out: FloatArray) -> None:
        halves = tuple(body.view(np.uint16)[start : start + out.size] for body in group.bodies)
        group_kernels.bf16_add_group(out, halves, group.scales, group.members, group.fresh)


make = Bf16


def _halves(out: ByteArray, values: FloatArray) -> HalfBits:
    halves = out.view(np.uint16)
    assert halves.shape == values.shape, "the buffer is as long as the codec says"
    return halves
