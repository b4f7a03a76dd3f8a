"""The moments of a fragment as blocks of 64 values, many at once: a few calls of torch, however many pieces there are.

On a GPU it is the calls that cost, not the values. So the moments of a fragment are gathered into one array of blocks,
[blocks, 64], which is encoded, decoded and adopted as a whole. Every row starts with a block of its own, as in a body.
One that does not fill its last block has zeros behind it, which change no byte and no value.

Bytes and values are those of numerics/moments.py, bit for bit. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from atoll.learner.codecs import CHUNK, decode_blocks, encode_blocks
from atoll.learner.model import copy_into
from atoll.numerics.codec import make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, HALF_CODE, TINY
from atoll.numerics.fragments import Fragment
from atoll.numerics.moments import CODEC, Moment, list_moments

BITS = 8
INT8 = make_codec(CODEC)
BLOCK_BYTES = INT8.nbytes(((1, ABSMAX_BLOCK),))


class MomentValues(NamedTuple):
    """One moment of one piece, and where its values are in the blocks of its run."""

    piece: int
    slot: int
    """Which of its form."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first_block: int
    blocks: int


class ByteRows(NamedTuple):
    """Rows of bytes in a body, next to each other, and where they are in the bytes of their run's blocks."""

    rows: int
    row_bytes: int
    in_body: int
    first_block: int
    blocks_per_row: int


class Run(NamedTuple):
    """Moments that are worked on at once."""

    moments: list[MomentValues]
    byte_rows: list[ByteRows]
    blocks: int
    squared: torch.Tensor
    """[blocks, 1], on the device: which of them hold a squared moment."""

    def gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The blocks of these moments, in fp32 and where `squared` is: an optimizer may keep its state elsewhere."""
        blocks = torch.zeros(self.blocks, ABSMAX_BLOCK, device=self.squared.device)
        torch._foreach_copy_(self.shape_blocks(blocks), list(tensors))
        return blocks

    def put(self, tensors: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
        """In each tensor's own type; a positive square stays one in it."""
        least = blocks.clone()
        torch._foreach_clamp_min_(self.split(least), [torch.finfo(tensor.dtype).tiny for tensor in tensors])
        values = self.shape_blocks(torch.where(self.squared & (blocks > 0), least, blocks))
        copy_into(tensors, values)

    def split(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """By moment."""
        return list(blocks.split([moment.blocks for moment in self.moments]))

    def shape_blocks(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Each moment's values in them, shaped like its piece."""
        return [
            blocks.as_strided(moment.shape, moment.strides, moment.first_block * ABSMAX_BLOCK)
            for moment in self.moments
        ]

    def encode(self, blocks: torch.Tensor, body: torch.Tensor) -> None:
        """Into the body, behind its forms."""
        roots = torch.where(self.squared, blocks.sqrt(), blocks)
        packed = torch.cat([encode_blocks(BITS, some) for some in roots.split(CHUNK // ABSMAX_BLOCK)])
        torch._foreach_copy_(self._cut_body(body), self._cut_packed(packed))

    def decode(self, body: torch.Tensor) -> torch.Tensor:
        """The blocks, from a body that was checked, without its forms."""
        packed = torch.zeros(self.blocks, BLOCK_BYTES, dtype=torch.uint8, device=body.device)
        torch._foreach_copy_(self._cut_packed(packed), self._cut_body(body))
        values = decode_blocks(BITS, packed, ABSMAX_BLOCK)
        return torch.where(self.squared, square_roots(values), values)

    def _cut_body(self, body: torch.Tensor) -> list[torch.Tensor]:
        start = body.storage_offset()
        return [
            body.as_strided((some.rows, some.row_bytes), (some.row_bytes, 1), start + some.in_body)
            for some in self.byte_rows
        ]

    def _cut_packed(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """A row's last block may be shorter in the body, so its bytes are the first ones of the row here."""
        return [
            packed.as_strided(
                (some.rows, some.row_bytes), (some.blocks_per_row * BLOCK_BYTES, 1), some.first_block * BLOCK_BYTES
            )
            for some in self.byte_rows
        ]


def square_roots(blocks: torch.Tensor) -> torch.Tensor:
    """Squared moments, from what was decoded of blocks of their roots […, values]."""
    roots = torch.maximum(blocks, blocks.amax(-1, keepdim=True) * float(HALF_CODE))
    return torch.where(roots > 0, roots.square().clamp_min(float(TINY)), roots)


def count_bytes(runs: Iterable[Run]) -> int:
    return sum(some.rows * some.row_bytes for run in runs for some in run.byte_rows)


def lay_out(part: Fragment, forms: Sequence[int], taken: Sequence[int], device: torch.device) -> list[Run]:
    """Of a body with these forms, the moments of the pieces for which `taken` has the same form."""
    moments = [one for one in list_moments(INT8, part, forms) if taken[one.piece] == forms[one.piece]]
    return [_make_run(part, some, device) for some in _cut_moments(moments)]


def _cut_moments(moments: Iterable[Moment]) -> list[list[Moment]]:
    """Into runs of at most CHUNK values, or of one moment, which bounds the memory that a run takes."""
    runs: list[list[Moment]] = []
    room = 0
    for moment in moments:
        values = _count_blocks(moment) * ABSMAX_BLOCK
        if not runs or values > room:
            runs.append([])
            room = CHUNK
        runs[-1].append(moment)
        room -= values
    return runs


def _make_run(part: Fragment, moments: Sequence[Moment], device: torch.device) -> Run:
    values: list[MomentValues] = []
    byte_rows: list[ByteRows] = []
    block = 0
    for moment in moments:
        shape, blocks = part.pieces[moment.piece].shape, _count_blocks(moment)
        values.append(MomentValues(moment.piece, moment.slot, shape, _find_strides(shape), block, blocks))
        _add_rows(byte_rows, _find_rows(part, moment, block))
        block += blocks
    counts = torch.tensor([moment.blocks for moment in values])
    squared = torch.tensor([moment.squared for moment in moments]).repeat_interleave(counts).unsqueeze(1)
    return Run(values, byte_rows, block, squared.to(device))


def _count_blocks(moment: Moment) -> int:
    return sum(count * _count_row_blocks(width) for count, width in moment.rows)


def _count_row_blocks(width: int) -> int:
    return -(-width // ABSMAX_BLOCK)


def _find_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor in blocks, where every row starts with a block of its own."""
    inner = [prod(shape[place + 1 :]) for place in range(len(shape))]
    if len(shape) >= 2:
        inner[0] = _count_row_blocks(inner[0]) * ABSMAX_BLOCK
    return tuple(inner)


def _find_rows(part: Fragment, moment: Moment, block: int) -> ByteRows:
    ((count, width),) = moment.rows
    start, per_row = moment.data.start - len(part.pieces), _count_row_blocks(width)
    if width % ABSMAX_BLOCK:
        return ByteRows(count, INT8.nbytes(((1, width),)), start, block, per_row)
    return ByteRows(count * per_row, BLOCK_BYTES, start, block, 1)


def _add_rows(byte_rows: list[ByteRows], new: ByteRows) -> None:
    """Full blocks that go on where others end in the body are one with them: most fragments are full blocks only."""
    last = byte_rows[-1] if byte_rows else new
    end = last.in_body + last.rows * last.row_bytes
    if last.row_bytes == new.row_bytes == BLOCK_BYTES and end == new.in_body:
        byte_rows[-1] = last._replace(rows=last.rows + new.rows)
    else:
        byte_rows.append(new)
