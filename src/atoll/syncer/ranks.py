"""The ranks of the learners that are connected: what each holds of every fragment, and the parts that they fetch.

- A learner declares its ranks when it says hello, for as long as that channel is open. What does not fit the model is
  refused in one line before anything comes of the hello. The other shards of a syncer of several are told, and have
  such a table each, of their part of the model.
- A part of a version is copied out of it when a rank asks for it, and hashed: large ones in a thread, and of one
  learner PARTS at a time. A rank that holds the whole fragment reads the version itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from atoll.digests import compute_digest
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.wire import SMALL_BYTES
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan
from atoll.numerics.initial import encode_initial
from atoll.numerics.rank_plan import RankPlan, check_tiling, make_rank_plans
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Hello, RankBoxes
from atoll.protocol.settings import Settings

PARTS = 8
"""Copies for one learner's ranks that are made or sent at a time. Who asks for more waits."""
MOST_PIECES = 1 << 16
"""In the plans of all ranks of a learner."""


def check_ranks(hello: Hello, settings: Settings) -> None:
    """AtollError unless the ranks that a learner declares can take part in a run of these settings."""
    if not hello.ranks:
        return
    if settings.shares_moments:
        raise PeerError(f'{hello.learner} has {len(hello.ranks)} ranks: share = "moments" is for learners of one rank')
    check_tiling(hello.tensors, hello.ranks)


class LearnerRanks:
    def __init__(
        self,
        plan: FragmentPlan,
        whole: FragmentPlan | None = None,
        declare: Callable[[str, tuple[RankBoxes, ...]], None] = lambda learner, ranks: None,
    ) -> None:
        """`plan`: of what this process holds of the model, whose plan is `whole`; None: of all of it. `declare` tells
        the other shards."""
        self._plan, self._declare = plan, declare
        cuts = (plan if whole is None else whole).fragments
        self._cuts = Counter(piece.tensor.name for fragment in cuts for piece in fragment.pieces)
        """Into how many pieces each tensor is cut."""
        self._plans: dict[str, tuple[RankPlan, ...]] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        """By learner, as above."""

    def add_learner(self, learner: str, ranks: tuple[RankBoxes, ...]) -> None:
        """They were checked, and are of this model. They take the place of those of a channel before. PeerError: they
        are too many; then nothing is changed."""
        pieces = sum(self._cuts[box.tensor] for boxes in ranks for box in boxes)
        if pieces > MOST_PIECES:
            raise PeerError(f"the ranks of {learner} have {pieces} pieces of tensors: {MOST_PIECES} are the most")
        self._plans.pop(learner, None)
        self._turns.pop(learner, None)
        if ranks:
            self._plans[learner] = make_rank_plans(self._plan, ranks)
            self._turns[learner] = asyncio.Semaphore(PARTS)
        self._declare(learner, ranks)

    def remove_learner(self, learner: str) -> None:
        self.add_learner(learner, ())

    def plans_of(self, learner: str) -> tuple[RankPlan, ...]:
        """In order of rank; none: it is a plain learner."""
        return self._plans.get(learner, ())

    def find_plan(self, learner: str, rank: int) -> RankPlan:
        plans = self.plans_of(learner)
        if not 0 <= rank < len(plans):
            raise PeerError(f"{learner} has no rank {rank}: it has declared {len(plans)}")
        return plans[rank]

    def find_sender(self, learner: str, rank: int) -> RankPlan | None:
        """Whose part a body is; None: it is a plain learner's, and so the whole. PeerError: nobody's."""
        return self.find_plan(learner, rank) if rank or self.plans_of(learner) else None

    async def serve_part(
        self, learner: str, rank: int, fragment: int, serve_whole: Callable[..., ServedFragment], codec: str = ""
    ) -> ServedFragment:
        """Return the rank's part of the version that is served when its turn has come. `codec`: form of version 0 that
        the rank can read."""
        plan, turn = self.find_plan(learner, rank), self._turns[learner]
        if not self._holds_something(plan, fragment):
            raise PeerError(f"rank {rank} of {learner} holds nothing of fragment {fragment}")
        if plan.plan.fragments[fragment].pieces == self._plan.fragments[fragment].pieces:
            return serve_whole(codec=codec)
        await turn.acquire()
        try:
            return await _copy_part(plan, fragment, serve_whole(), turn.release, codec)
        except BaseException:
            turn.release()
            raise

    def _holds_something(self, plan: RankPlan, fragment: int) -> bool:
        return fragment < len(self._plan.fragments) and plan.plan.fragments[fragment].size > 0


async def _copy_part(
    plan: RankPlan, fragment: int, whole: ServedFragment, release: Callable[[], None], codec: str
) -> ServedFragment:
    """The version itself is let go."""
    try:
        large = 4 * plan.plan.fragments[fragment].size > SMALL_BYTES
        form = codec if whole.version == 0 else ""
        work = partial(_take_and_hash, plan, fragment, np.frombuffer(whole.data, np.float32), form)
        data, digest, form = await asyncio.to_thread(work) if large else work()
    finally:
        whole.release()
    return ServedFragment(whole.version, whole.round, digest, data, release, codec=form)


def _take_and_hash(plan: RankPlan, fragment: int, whole: FloatArray, codec: str) -> tuple[memoryview, str, str]:
    """Return the part, its digest and its form."""
    part = plan.plan.fragments[fragment]
    values = np.empty(part.size, np.float32)
    plan.take(fragment, whole, values)
    coded = encode_initial(part, values) if codec else None
    data = (values.view(np.uint8) if coded is None else coded).data
    return data, compute_digest(data), codec if coded is not None else ""
