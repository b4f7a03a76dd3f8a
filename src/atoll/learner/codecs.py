"""The codecs of `numerics` on a device: bodies and rests equal bit for bit to those of the CPU.

Every operation below rounds as IEEE says, each as a kernel of its own: nothing is contracted into a fused
multiply-add. A device divides by a number on the host through its reciprocal: so divisors are tensors here. Bodies that
come from others are checked on the CPU before they are decoded here. Blocks are worked on some at a time: what that
takes besides its arguments is `scratch_bytes` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from atoll.numerics.absmax import Absmax
from atoll.numerics.codec import Codec, body_parts, count_values
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, TOPK_BLOCK, TOPK_PERCENT
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import Fragment, Rows

CHUNK = 1 << 22
"""Values that are worked on at a time."""
SCRATCH = 64
"""Bytes that one of them needs at most while it is worked on: top-k sorts; int8 and int4 need less than half of it."""
NOT_FINITE = 0x7F800000
NAN = 0x7FC00000
SMALLEST = 0x00800000
"""Bits of Inf, of the NaN that marks a block, and of the smallest normal float32."""


def scratch_bytes(codec: Codec, values: int) -> int:
    """For a fragment of so many values."""
    return SCRATCH * min(CHUNK, values) if isinstance(codec, Absmax | TopK) else 0


@torch.no_grad()
def encode_contribution(
    codec: Codec,
    part: Fragment,
    base: torch.Tensor,
    theta: torch.Tensor,
    feedback: torch.Tensor | None,
    rest: torch.Tensor | None,
    out: torch.Tensor,
    delta: torch.Tensor | None = None,
) -> None:
    """Encode a whole fragment as `numerics.codec.encode_contribution` does. θ is overwritten, unless `delta` is given:
    memory for as many values."""
    delta = theta if delta is None else delta
    torch.sub(base, theta, out=delta)
    for by, rows, values, data, buffers in body_parts(codec, part):
        total, left = delta[values], None if rest is None else rest[values]
        if buffers:
            total.view(torch.int32).bitwise_and_(-0x10000)
            encode(by, total, rows, out[data])
            if left is not None:
                left.zero_()
            continue
        if feedback is not None:
            total += feedback[values]
        encode(by, total, rows, out[data], left)


@torch.no_grad()
def encode(codec: Codec, total: torch.Tensor, rows: Rows, out: torch.Tensor, rest: torch.Tensor | None = None) -> None:
    """`total`: flat float32, (base − θ) + feedback; `out`: bytes on the same device; rest ← total − decoded."""
    assert total.numel() == count_values(rows) and out.numel() == codec.nbytes(rows), "arrays and rows are of one plan"
    if isinstance(codec, Absmax | TopK):
        _encode_by_block(codec, total, rows, out, rest)
        return
    if not total.numel():
        return
    if codec.name == "bf16":
        decoded = out.view(torch.bfloat16)
        decoded.copy_(total)
    else:
        decoded = total
        out.copy_(total.view(torch.uint8))
    if rest is not None:
        torch.sub(total, decoded, out=rest)


@torch.no_grad()
def decode(codec: Codec, data: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    """Of a body that was checked."""
    assert out.numel() == count_values(rows) and data.numel() == codec.nbytes(rows), "arrays and rows are of one plan"
    if isinstance(codec, Absmax | TopK):
        _decode_by_block(codec, data, rows, out)
    elif out.numel():
        out.copy_(data.view(torch.bfloat16 if codec.name == "bf16" else torch.float32))


def _encode_by_block(
    codec: Absmax | TopK, total: torch.Tensor, rows: Rows, out: torch.Tensor, rest: torch.Tensor | None
) -> None:
    def work(values: torch.Tensor, body: torch.Tensor, left: torch.Tensor) -> None:
        into = None if rest is None else left
        body.copy_(encode_top(values, into) if isinstance(codec, TopK) else encode_blocks(codec.bits, values, into))

    _by_block(codec, rows, work, total, out, total if rest is None else rest)


def _decode_by_block(codec: Absmax | TopK, data: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    def work(values: torch.Tensor, body: torch.Tensor, _: torch.Tensor) -> None:
        size = values.shape[-1]
        values.copy_(decode_top(body, size) if isinstance(codec, TopK) else decode_blocks(codec.bits, body, size))

    _by_block(codec, rows, work, out, data, out)


def _by_block(
    codec: Absmax | TopK,
    rows: Rows,
    work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    values: torch.Tensor,
    body: torch.Tensor,
    beside: torch.Tensor,
) -> None:
    """`work` on the full blocks of each tensor, then on the shorter ones at the ends of its rows: [rows, blocks, …]."""
    value = byte = 0
    size = TOPK_BLOCK if isinstance(codec, TopK) else ABSMAX_BLOCK
    for count, width in [(1, count * width) for count, width in rows] if isinstance(codec, TopK) else rows:
        ends, row_bytes = width - width % size, codec.row_bytes(width)
        here, there = slice(value, value + count * width), slice(byte, byte + count * row_bytes)
        of_rows = [one[here].view(count, width) for one in (values, beside)]
        bytes_of_rows = body[there].view(count, row_bytes)
        cut = codec.row_bytes(ends)
        if ends:
            v, b = (one[:, :ends].unflatten(1, (-1, size)) for one in of_rows)
            _by_chunk(work, v, bytes_of_rows[:, :cut].unflatten(1, (ends // size, -1)), b)
        if ends < width:
            v, b = (one[:, ends:].unflatten(1, (1, -1)) for one in of_rows)
            _by_chunk(work, v, bytes_of_rows[:, cut:].unflatten(1, (1, -1)), b)
        value, byte = here.stop, there.stop


def _by_chunk(work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], *arrays: torch.Tensor) -> None:
    for rows, blocks in _cut(*arrays[0].shape):
        values, body, beside = (one[rows, blocks] for one in arrays)
        work(values, body, beside)


def _cut(rows: int, blocks: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Of an array [rows, blocks, size], parts of at most CHUNK values."""
    at_once = max(1, CHUNK // size)
    of_row = min(blocks, at_once)
    step = max(1, at_once // blocks)
    for row in range(0, rows, step):
        for block in range(0, blocks, of_row):
            yield slice(row, row + step), slice(block, block + of_row)


# ---- int8 and int4 --------------------------------------------------------------------------------------------------


def _scales(bits: int, most: torch.Tensor) -> torch.Tensor:
    """`codec_kernels.absmax_scale`."""
    levels = torch.full_like(most, (1 << (bits - 1)) - 1, dtype=torch.float32)
    scale = (most.view(torch.float32) / levels).view(torch.int32) & (-0x100 if bits == 8 else -0x10000)
    scale = torch.where(scale >= SMALLEST, scale, 0)
    return torch.where(most >= NOT_FINITE, NAN, scale)


def encode_blocks(bits: int, values: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of blocks […, values]; rest ← values − decoded."""
    values = values.contiguous()
    scale = _scales(bits, (values.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True))
    codes, step = _quantise(bits, values, scale)
    if rest is not None:
        rest.copy_(torch.where(scale == NAN, 0.0, values - codes * step))
    return torch.cat([_scale_bytes(bits, scale), _pack(bits, codes.to(torch.int8).view(torch.uint8))], -1)


def _quantise(bits: int, values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, as float32, and what one of them stands for; `scale` as its bits."""
    levels = float((1 << (bits - 1)) - 1)
    sound = (scale > 0) & (scale < NOT_FINITE)
    step = torch.where(sound, scale, 0).view(torch.float32)
    codes = torch.round(values * (torch.ones_like(step) / step)).clamp(-levels, levels)
    return torch.where(sound, codes, 0.0), step


def _scale_bytes(bits: int, scale: torch.Tensor) -> torch.Tensor:
    """The upper bytes of scales […, 1]."""
    return scale.view(torch.uint8)[..., 1 if bits == 8 else 2 :]


def _pack(bits: int, codes: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return codes
    half = (codes.shape[-1] + 1) // 2
    high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - codes.shape[-1]))
    return (codes[..., :half] & 15) | (high << 4)


def decode_blocks(bits: int, body: torch.Tensor, count: int) -> torch.Tensor:
    head = 2 if bits == 4 else 3
    packed = body[..., head:]
    if bits == 4:
        packed = torch.cat([packed << 4, packed & 0xF0], -1)[..., :count]
    codes = packed.view(torch.int8)
    return (codes >> 4 if bits == 4 else codes).to(torch.float32) * _read_scales(body[..., :head])


def _read_scales(head: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(head, (4 - head.shape[-1], 0)).view(torch.float32)


# ---- top-k ----------------------------------------------------------------------------------------------------------


def encode_top(values: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of blocks […, values]; rest ← values − decoded."""
    values = values.contiguous()
    keep = -(-TOPK_PERCENT * values.shape[-1] // 100)
    sizes = values.view(torch.int32) & 0x7FFFFFFF
    scale = _scales(6, sizes.amax(-1, keepdim=True))
    broken = scale == NAN
    # A stable sort keeps the first of equal ones; which values a broken block keeps says nothing.
    order = torch.sort(torch.where(broken, 0, sizes), dim=-1, descending=True, stable=True).indices
    offsets = order[..., :keep].sort(-1).values
    kept = values.gather(-1, offsets)
    codes, step = _quantise(6, kept, scale)
    if rest is not None:
        rest.copy_(torch.where(broken, 0.0, values.scatter(-1, offsets, kept - codes * step)))
    words = offsets.to(torch.int32) << 6 | (codes.to(torch.int32) & 63)
    packed = torch.stack([words & 255, words >> 8], -1).flatten(-2).to(torch.uint8)
    return torch.cat([_scale_bytes(6, scale), packed], -1)


def decode_top(body: torch.Tensor, count: int) -> torch.Tensor:
    words = body[..., 2::2].to(torch.int32) | body[..., 3::2].to(torch.int32) << 8
    codes = ((words & 63) - ((words & 32) << 1)).to(torch.float32)
    out = torch.zeros(*body.shape[:-1], count, device=body.device)
    return out.scatter(-1, (words >> 6).to(torch.int64), codes * _read_scales(body[..., :2]))
