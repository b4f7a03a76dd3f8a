"""Shared moments in lockstep: the product's codec and arithmetic, without its processes."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch
from lockstep_learner import LockstepLearner, flatten_pieces, shape_like
from lockstep_syncer import take_mean

from atoll.learner.moment_blocks import Run, count_bytes, lay_out
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import Fragment, row_lengths
from atoll.numerics.moments import NAMES, NONE

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
                form = NAMES.index("square" if slot == "exp_avg_sq" else "mean")
                forms = [form if learners[0].has_moment(piece, slot) else NONE for piece in part.pieces]
                runs = lay_out(part, forms, forms, held[0][0].device)
                arrived = [self._transfer(pieces, runs) for pieces in held]
                mean = self._transfer(shape_like(take_mean(arrived), held[0]), runs)
                averaged[slot] = SharedMoment(mean, [flatten_pieces(pieces) for pieces in held])
                kept = [piece for piece, form in zip(part.pieces, forms, strict=True) if form != NONE]
                self.sent += self._codec.nbytes(row_lengths(kept))
        return averaged

    def _transfer(self, pieces: list[torch.Tensor], runs: list[Run]) -> torch.Tensor:
        """What arrives of them."""
        if self._codec.name == "fp32":
            return flatten_pieces(pieces)
        body = torch.empty(count_bytes(runs), dtype=torch.uint8, device=pieces[0].device)
        left, arrived = iter(pieces), []
        for run in runs:
            run.encode(run.gather(list(islice(left, len(run.moments)))), body)
            arrived += run.shape_blocks(run.decode(body))
        return flatten_pieces(arrived)


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
