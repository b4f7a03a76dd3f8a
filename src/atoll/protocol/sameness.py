"""Whether two learners train on the same batches, which makes the work of one worth nothing.

With data of its own a learner says, every few steps, a number made of what its model was given. Rules kept here, each
with its test: two learners that have `COMMON` different numbers in common are told of, once; a number that one says
again and again is one number; who is gone is compared with nobody.
"""

from __future__ import annotations

from collections import deque

from atoll.protocol.membership import Learner, Membership
from atoll.protocol.outbox import Outbox

COMMON = 3
KEPT = 64
"""The newest numbers of each learner: as far as one may be behind the other."""


class SameBatches:
    def __init__(self, members: Membership, out: Outbox) -> None:
        self.members, self.out = members, out
        self._said: dict[str, deque[int]] = {}
        self._common: dict[tuple[str, str], int] = {}

    def reported(self, learner: Learner, number: int) -> None:
        """−1: it says nothing of its batches."""
        mine = self._said.setdefault(learner.name, deque(maxlen=KEPT))
        if number < 0 or number in mine:
            return
        mine.append(number)
        for other in self.members.connected():
            if other is not learner and number in self._said.get(other.name, ()):
                self._count(*sorted((learner, other), key=lambda one: one.name))

    def _count(self, one: Learner, other: Learner) -> None:
        pair = (one.name, other.name)
        self._common[pair] = self._common.get(pair, 0) + 1
        if self._common[pair] == COMMON:
            text = (
                f"{one.name} and {other.name} train on the same batches, so one of them works for nothing: take them "
                "from learner.batches or learner.sampler, or shuffle by learner.seed"
            )
            self.out.note("same_batches", text, one, other=other.name)
