"""What arrives of numbers that all learners of the lockstep loop send at once, by the shipped codecs.

Blocks do not know each other. So those of all learners and all tensors that have one length are encoded and decoded
together, by the functions that do it on a learner's device: a few calls of torch for a fragment, and no bodies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from atoll.learner.codecs import decode, decode_blocks, decode_top, encode, encode_blocks, encode_top
from atoll.numerics.absmax import Absmax
from atoll.numerics.codec import Codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, TOPK_BLOCK
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import Rows


class Place(NamedTuple):
    """Blocks of one length in rows that lie next to each other."""

    start: int
    """Of the first block, in the values of a learner."""
    rows: int
    width: int
    blocks: int
    """Of each row, next to each other."""

    def view(self, values: torch.Tensor, length: int) -> torch.Tensor:
        """[learners, rows, blocks, length] of [learners, values]."""
        learners, stride = values.shape
        return values.as_strided(
            (learners, self.rows, self.blocks, length), (stride, self.width, length, 1), self.start
        )


Places = Mapping[int, list[Place]]
"""By the length of blocks."""


@lru_cache(maxsize=1024)
def find_blocks(codec: Absmax | TopK, rows: Rows) -> Places:
    """Those of top-k run over the rows of a tensor. Full ones that follow each other are one place."""
    found: dict[int, list[Place]] = defaultdict(list)
    size, start = TOPK_BLOCK if isinstance(codec, TopK) else ABSMAX_BLOCK, 0
    for count, width in rows:
        joined = isinstance(codec, TopK) or width % size == 0
        height, across = (1, count * width) if joined else (count, width)
        full, tail = divmod(across, size)
        if full:
            _add_place(found[size], Place(start, height, across, full), size)
        if tail:
            found[tail].append(Place(start + full * size, height, across, 1))
        start += count * width
    return dict(found)


def _add_place(places: list[Place], new: Place, size: int) -> None:
    last = places[-1] if places else new
    if last.rows == new.rows == 1 and last.start + last.blocks * size == new.start:
        places[-1] = last._replace(width=last.width + new.width, blocks=last.blocks + new.blocks)
    else:
        places.append(new)


def work_on_blocks(places: Places, values: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `work` makes of the blocks [learners, blocks, length] of values [learners, values], shaped like these."""
    values, out = values.contiguous(), torch.empty_like(values, memory_format=torch.contiguous_format)
    for length, of_length in places.items():
        blocks = torch.cat([place.view(values, length).flatten(1, 2) for place in of_length], 1)
        done = work(blocks).split([place.rows * place.blocks for place in of_length], 1)
        into = [place.view(out, length) for place in of_length]
        torch._foreach_copy_(into, [one.view(to.shape) for one, to in zip(done, into, strict=True)])
    return out


def transfer(codec: Codec, values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """What arrives of finite values [learners, values]; `rows`: those of one learner."""
    if isinstance(codec, Absmax | TopK):
        return work_on_blocks(find_blocks(codec, rows), values, lambda blocks: transfer_blocks(codec, blocks))
    body = torch.empty(len(values) * codec.nbytes(rows), dtype=torch.uint8, device=values.device)
    encode(codec, values.reshape(-1), rows * len(values), body)
    arrived = torch.empty_like(values)
    decode(codec, body, rows * len(values), arrived.view(-1))
    return arrived


def transfer_blocks(codec: Absmax | TopK, blocks: torch.Tensor) -> torch.Tensor:
    length = blocks.shape[-1]
    if isinstance(codec, TopK):
        return decode_top(encode_top(blocks), length)
    return decode_blocks(codec.bits, encode_blocks(codec.bits, blocks), length)
