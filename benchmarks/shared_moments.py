"""Shared moments, as the product might have them. They are in this benchmark alone: what it measures decides that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from lockstep_learner import LockstepLearner, flatten_pieces, shape_like
from lockstep_syncer import take_mean

from atoll.learner.codecs import decode, encode
from atoll.numerics.codec import make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK
from atoll.numerics.fragments import Fragment, Rows, row_lengths

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of AdamW, and of Muon or SGD."""


class SharedMoment(NamedTuple):
    averaged: torch.Tensor
    read: list[torch.Tensor]
    """Each learner's own."""


class SharedMoments:
    """The inner optimizer's moments of a fragment, averaged over the learners as they were when it was read. They are
    adopted with its version by the same rule: overwrite takes m̄; carry keeps what the n steps since have added to the
    learner's own, m ← m + βⁿ(m̄ − m_read), which leaves exp_avg_sq above zero. `step` stays local.

    With int8 they travel by the shipped codec, without feedback, both ways; exp_avg_sq as its square root, of which
    nothing in a block is below half a code: a value above zero never becomes zero."""

    def __init__(self, codec: str) -> None:
        self._codec = make_codec(codec)
        self.sent = 0
        """By one learner, and as many come down to it."""

    def average(self, part: Fragment, learners: list[LockstepLearner]) -> dict[str, SharedMoment]:
        averaged = {}
        for slot in MOMENTS:
            held = [one.moments(part, slot) for one in learners]
            if held[0]:
                rows = row_lengths([piece for piece in part.pieces if learners[0].has_moment(piece, slot)])
                read = [flatten_pieces(pieces) for pieces in held]
                arrived = [self._transfer(values, rows, slot) for values in read]
                averaged[slot] = SharedMoment(self._transfer(take_mean(arrived), rows, slot), read)
                self.sent += self._codec.nbytes(rows)
        return averaged

    def _transfer(self, values: torch.Tensor, rows: Rows, slot: str) -> torch.Tensor:
        """What arrives of them."""
        if self._codec.name == "fp32":
            return values
        if slot != "exp_avg_sq":
            return self._encode_and_decode(values, rows)
        roots = self._encode_and_decode(values.sqrt(), rows)
        return torch.maximum(roots, _block_floor(roots, rows)).square()

    def _encode_and_decode(self, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        body = torch.empty(self._codec.nbytes(rows), dtype=torch.uint8, device=values.device)
        encode(self._codec, values, rows, body)
        arrived = torch.empty_like(values)
        decode(self._codec, body, rows, arrived)
        return arrived


def _block_floor(roots: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Half a code of each value's block: the largest of a block is code 127."""
    floors, start = [], 0
    for count, width in rows:
        values = roots[start : start + count * width].view(count, width)
        padded = torch.nn.functional.pad(values, (0, -width % ABSMAX_BLOCK)).unflatten(1, (-1, ABSMAX_BLOCK))
        largest = padded.amax(-1, keepdim=True).expand_as(padded).flatten(1)[:, :width]
        floors.append(largest.reshape(-1) / 254)
        start += count * width
    return torch.cat(floors)


def adopt_moments(
    learners: list[LockstepLearner], part: Fragment, slot: str, moment: SharedMoment, rule: str, steps: int
) -> None:
    """`steps`: made since it was read."""
    for one, read in zip(learners, moment.read, strict=True):
        own = one.moments(part, slot)
        if rule == "carry":
            change = (moment.averaged - read) * one.decays[slot] ** steps
            torch._foreach_add_(own, shape_like(change, own))
        else:
            torch._foreach_copy_(own, shape_like(moment.averaged, own))
