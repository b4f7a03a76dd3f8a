"""Shared moments in lockstep: the product's codec and arithmetic, without its processes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from lockstep_learner import LockstepLearner, flatten_pieces, shape_like
from lockstep_syncer import take_mean

from atoll.learner.moments import decode_moment, encode_moment
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import Fragment, Rows, row_lengths
from atoll.numerics.moments import Moment

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

    With int8 they travel as the product's do (learner/moments.py), both ways; but m_read is the learner's own, not what
    was encoded of it."""

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
        body = torch.empty(self._codec.nbytes(rows), dtype=torch.uint8, device=values.device)
        moment = Moment(0, 0, slot == "exp_avg_sq", rows, slice(0, body.numel()))
        encode_moment(self._codec, moment, values, body)
        return decode_moment(self._codec, moment, body)


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
