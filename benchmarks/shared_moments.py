"""Shared moments in lockstep: the product's codec and arithmetic, without its processes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from lockstep_codec import find_blocks, transfer_blocks, work_on_blocks
from lockstep_learner import LockstepLearner, flatten_pieces, shape_like
from lockstep_syncer import take_mean

from atoll.learner.moment_blocks import square_roots
from atoll.numerics.absmax import Absmax
from atoll.numerics.codec import Codec, make_codec
from atoll.numerics.fragments import Fragment, Rows, row_lengths

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of AdamW, and of Muon or SGD."""


class SharedMoment(NamedTuple):
    averaged: torch.Tensor
    read: torch.Tensor
    """[learners, values]: each learner's own."""


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
                read = torch.stack([flatten_pieces(pieces) for pieces in held])
                transfer = partial(transfer_moments, self._codec, rows=rows, squared=slot == "exp_avg_sq")
                mean = take_mean(list(transfer(read)))
                averaged[slot] = SharedMoment(transfer(mean.unsqueeze(0))[0], read)
                self.sent += self._codec.nbytes(rows)
        return averaged


def transfer_moments(codec: Codec, values: torch.Tensor, rows: Rows, *, squared: bool) -> torch.Tensor:
    """What arrives of moments [learners, values]; squared ones travel as their roots."""
    if not isinstance(codec, Absmax):
        return values

    def work(blocks: torch.Tensor) -> torch.Tensor:
        return square_roots(transfer_blocks(codec, blocks.sqrt())) if squared else transfer_blocks(codec, blocks)

    return work_on_blocks(find_blocks(codec, rows), values, work)


def adopt_moments(
    learners: list[LockstepLearner], part: Fragment, slot: str, moment: SharedMoment, rule: str, steps: int
) -> None:
    """`steps`: made since it was read."""
    own = [one.moments(part, slot) for one in learners]
    flat = [piece for pieces in own for piece in pieces]
    if rule == "carry":
        changes = (moment.averaged - moment.read) * learners[0].decays[slot] ** steps
        each = zip(changes, own, strict=True)
        torch._foreach_add_(flat, [piece for change, pieces in each for piece in shape_like(change, pieces)])
    else:
        torch._foreach_copy_(flat, shape_like(moment.averaged, own[0]) * len(own))
