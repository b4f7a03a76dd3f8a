"""Top-k: of every block of 1024 values the 9 % that are largest, in 2 bytes each; the others are 0.

It is of use with feedback only: what is not sent now is in the rest, and so sent later.

- Blocks start anew at every tensor, and run over its rows: rows of a few values would send more of them. The last block
  of a tensor may be shorter. 9 % of it are kept, rounded up: 93 of 1024, which is 1.47 bits a value.
- Those that are kept are the largest by |value|; of equal ones, the first.
- A block is its scale (the upper 2 bytes of a float32, low byte first: absmax / 31, cut off to 8 significant bits),
  then one word of 2 bytes for each kept value, in ascending order: offset · 64 + the low 6 bits of its code. Codes are
  rounded half to even and kept within ±31; the error of a kept value is at most scale / 2 (and a 2⁻²⁰th of it).
- NaN, Inf and blocks too small to have a scale are treated as in absmax.py.
- Refused: the code −32, an offset past the end of its block, offsets that do not ascend, scales as in absmax.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import msgspec

from atoll.numerics import codec_kernels
from atoll.numerics.arrays import ByteArray, FloatArray, IndexArray
from atoll.numerics.codec import Delta, check_length, count_values, decode_in_parts
from atoll.numerics.codec_kernels import TOPK_BLOCK, TOPK_PERCENT
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.fragments import Rows
from atoll.protocol.errors import PeerError

BLOCK_OVER_ROWS = TOPK_BLOCK
"""Where a tensor is cut, so that its parts have the blocks of the whole (shard_plan.py): at multiples of this."""
FAULTS = (
    "a scale that is not finite, negative or out of range",
    "a code that is reserved",
    "an offset that is past its end or does not ascend",
)


class TopK(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "topk"
    needs_feedback: ClassVar[bool] = True
    threads: int = 1

    def row_bytes(self, values: int) -> int:
        """Of one tensor."""
        full, tail = divmod(values, TOPK_BLOCK)
        return full * (2 + 2 * _kept(TOPK_BLOCK)) + (2 + 2 * _kept(tail) if tail else 0)

    def nbytes(self, rows: Rows) -> int:
        return sum(self.row_bytes(count * width) for count, width in rows)

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None:
        self.encode_delta(Delta(values, values[:0]), rows, out)

    def encode_delta(self, delta: Delta, rows: Rows, out: ByteArray) -> None:
        base, theta, feedback, rest = delta.as_inputs()
        assert base.size == count_values(rows) and out.size == self.nbytes(rows), "arrays and rows are of one fragment"
        for values, data in self._tensors(rows):
            part = (base[values], theta[values], feedback[values], rest[values], out[data])
            self._run(partial(codec_kernels.topk_encode, *part), values)

    def check(self, data: ByteArray, rows: Rows) -> None:
        check_length(self, data, rows)
        for number, (values, place) in enumerate(self._tensors(rows)):
            wrong = codec_kernels.topk_check(read_only(data[place]), values.stop - values.start)
            if wrong >= 0:
                raise PeerError(f"block {wrong // 4} of tensor {number} has {FAULTS[wrong % 4]} (topk)")

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        decode_in_parts(self, data, rows, out, self.threads)

    def decode_runs(self, data: ByteArray, tensor: tuple[int, int], starts: IndexArray, out: FloatArray) -> None:
        codec_kernels.topk_decode(data, out, starts, tensor[0] * tensor[1])

    def _run(self, work: Callable[[int, int], None], values: slice) -> None:
        in_parts(work, -(-(values.stop - values.start) // TOPK_BLOCK), PART // TOPK_BLOCK, self.threads)

    def _tensors(self, rows: Rows) -> Iterator[tuple[slice, slice]]:
        value = byte = 0
        for count, width in rows:
            values, data = count * width, self.row_bytes(count * width)
            yield slice(value, value + values), slice(byte, byte + data)
            value, byte = value + values, byte + data


make = TopK


def _kept(values: int) -> int:
    return -(-TOPK_PERCENT * values // 100)
