"""int8 and int4: codes of few bits, and one scale for each block of 64 values.

- Blocks start anew at every row of a tensor, so a tensor that is split along its rows has the same blocks; the last
  block of a row may be shorter. Blocks do not know each other.
- A block is its scale, then its codes. scale = absmax / 127 (int8) or absmax / 7 (int4), cut off to 16 or 8 significant
  bits and stored in 3 or 2 bytes: the upper ones of a float32, low byte first. 8.375 and 4.25 bits a value in rows of a
  multiple of 64.
- code = Δ · (1 / scale), rounded half to even, kept within ±127 or ±7; decoded is code · scale, which is exact. The
  error is at most scale / 2 (and a 2⁻²⁰th of it, for the rounding of the product).
- Codes are two's complement. int4 has the first half of a block in the low four bits of its bytes and the second half
  in the high ones; of an odd number of codes the last high one is 0.
- A body that was decoded and is encoded again gives the same bytes.
- A block whose scale would be below 2⁻¹²⁶ is sent as zeros, with scale 0. One that holds NaN or Inf has the scale NaN:
  it is refused where it arrives.
- No encoder writes the codes −128 and −8, or a scale that is negative, subnormal or too large for float32: refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import msgspec

from atoll.numerics import codec_kernels, group_kernels
from atoll.numerics.arrays import ByteArray, FloatArray, IndexArray
from atoll.numerics.codec import BodyGroup, Delta, check_length, count_values, decode_in_parts
from atoll.numerics.codec_kernels import ABSMAX_BLOCK
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.fragments import Rows
from atoll.protocol.errors import PeerError


class TensorBlocks(NamedTuple):
    """One tensor's rows, and where its values and its bytes are."""

    number: int
    values: slice
    data: slice
    width: int
    row_bytes: int
    blocks: int


class Absmax(msgspec.Struct, frozen=True):
    needs_feedback: ClassVar[bool] = True
    bits: int
    threads: int = 1

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def row_bytes(self, width: int) -> int:
        full, tail = divmod(width, ABSMAX_BLOCK)
        head = 2 if self.bits == 4 else 3
        short = head + (tail * self.bits + 7) // 8 if tail else 0
        return full * (head + ABSMAX_BLOCK * self.bits // 8) + short

    def nbytes(self, rows: Rows) -> int:
        return sum(count * self.row_bytes(width) for count, width in rows)

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None:
        self.encode_delta(Delta(values, values[:0]), rows, out)

    def encode_delta(self, delta: Delta, rows: Rows, out: ByteArray) -> None:
        base, theta, feedback, rest = delta.as_inputs()
        assert base.size == count_values(rows) and out.size == self.nbytes(rows), "arrays and rows are of one fragment"

        def work(of: TensorBlocks, first: int, last: int) -> None:
            given = (base[of.values], theta[of.values], feedback[of.values], rest[of.values])
            codec_kernels.absmax_encode(*given, out[of.data], of.width, of.row_bytes, self.bits, first, last)

        self._run(work, rows)

    def check(self, data: ByteArray, rows: Rows) -> None:
        check_length(self, data, rows)
        given = read_only(data)
        faults: list[tuple[int, int]] = []

        def work(of: TensorBlocks, first: int, last: int) -> None:
            wrong = codec_kernels.absmax_check(given[of.data], of.width, of.row_bytes, self.bits, first, last)
            if wrong >= 0:
                faults.append((of.number, wrong))

        self._run(work, rows)
        if faults:
            number, wrong = min(faults)
            what = "a code that is reserved" if wrong % 2 else "a scale that is not finite, negative or out of range"
            raise PeerError(f"block {wrong // 2} of tensor {number} has {what} ({self.name})")

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        decode_in_parts(self, data, rows, out, self.threads)

    def decode_runs(self, data: ByteArray, tensor: tuple[int, int], starts: IndexArray, out: FloatArray) -> None:
        width = tensor[1]
        codec_kernels.absmax_decode(data, out, starts, width, self.row_bytes(width), self.bits)

    def add_bodies(self, group: BodyGroup, tensor: tuple[int, int], start: int, out: FloatArray) -> None:
        group_kernels.absmax_add_group(out, *group, start, tensor[1], self.row_bytes(tensor[1]), self.bits)

    def _run(self, work: Callable[[TensorBlocks, int, int], None], rows: Rows) -> None:
        """Over blocks `first` to `last` of each tensor: threads share the runs of all tensors, not of one at a time."""
        each = PART // ABSMAX_BLOCK
        runs = [(one, first) for one in self._segments(rows) for first in range(0, one.blocks, each)]

        def work_on(begin: int, end: int) -> None:
            for one, first in runs[begin:end]:
                work(one, first, min(first + each, one.blocks))

        in_parts(work_on, len(runs), 1, self.threads)

    def _segments(self, rows: Rows) -> Iterator[TensorBlocks]:
        value = byte = 0
        for number, (count, width) in enumerate(rows):
            values, data, per_row = count * width, count * self.row_bytes(width), -(-width // ABSMAX_BLOCK)
            yield TensorBlocks(
                number,
                slice(value, value + values),
                slice(byte, byte + data),
                width,
                self.row_bytes(width),
                count * per_row,
            )
            value, byte = value + values, byte + data
