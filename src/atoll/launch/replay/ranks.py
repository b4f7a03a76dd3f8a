"""A learner of several ranks in a replay: its training processes do what the tape of rank 0 says, each with its part.

Rules kept here:
- all ranks are given the same frames in the same order, and train on together: a rank alone could not make a step;
- what they give of a contribution, or of the first parameters, counts once all have given theirs; it is put together as
  the syncer puts it together (numerics/rank_plan.py);
- a version is adopted once all have adopted their part of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from atoll.launch.children import Child
from atoll.launch.replay.process import GivenContribution, ReplayedProcess, ReplayServices
from atoll.launch.replay.recording import ProcessRecording, RecordedAction, RecordedCopy
from atoll.mailbox.channel import CourierChannel, Start
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment
from atoll.numerics.rank_plan import RankPlan, make_rank_plans
from atoll.numerics.rank_shards import cut_rank_plan


class ReplayedRanks:
    """As one `ReplayedProcess` to whoever conducts the replay."""

    def __init__(self, part: ProcessRecording, acts: list[RecordedAction], child: Child, count: int) -> None:
        self.part, self.child = part, child
        self._ranks = [ReplayedProcess(part, acts, child) for _ in range(count)]
        self._plans: tuple[RankPlan, ...] = ()
        self._given: dict[int, dict[int, FloatArray]] = {}
        """By round and rank, what arrived of a contribution."""
        self._first: dict[int, list[FloatArray]] = {}
        """By rank, the first parameters: every fragment."""
        self._adopted: Counter[tuple[int, int]] = Counter()
        """By fragment and version, how many ranks have it."""

    @property
    def connected(self) -> bool:
        return all(rank.connected for rank in self._ranks)

    def connect(self, channel: CourierChannel, start: Start, replay: ReplayServices) -> ReplayedProcess:
        self._plans = self._plans or make_rank_plans(replay.plan, start.ranks)
        if start.rank == 0:
            os.close(channel.take_descriptor())  # a socket at which couriers of the other ranks would come
        rank = self._ranks[start.rank]
        rank.connect(channel, start, self._serve_rank(start.rank, replay))
        return rank

    def _serve_rank(self, rank: int, replay: ReplayServices) -> ReplayServices:
        plan = self._plans[rank]

        def version(fragment: int, number: int) -> FloatArray | None:
            if (whole := replay.version(fragment, number)) is None:
                return None
            plan.take(fragment, whole, local := np.empty(plan.plan.fragments[fragment].size, np.float32))
            return local

        return replace(
            replay,
            plan=plan.plan,
            sent=plan.sent if replay.shards is None else cut_rank_plan(plan, replay.shards).sent,
            ranks=True,
            version=version,
            adopted=partial(self._count_adoption, replay),
            given=partial(self._join_contribution, replay, rank),
            owned=partial(self._join_first_parameters, replay, rank),
            remark=replay.remark if rank == 0 else lambda _: None,
        )

    def _count_adoption(self, replay: ReplayServices, fragment: int, version: int) -> None:
        self._adopted[fragment, version] += 1
        if self._adopted[fragment, version] == len(self._ranks):
            del self._adopted[fragment, version]
            replay.adopted(fragment, version)

    def _join_contribution(
        self, replay: ReplayServices, rank: int, copy: RecordedCopy, learner: str, given: GivenContribution
    ) -> None:
        parts = self._given.setdefault(copy.round, {})
        parts[rank] = given.delta
        if len(parts) == len(self._ranks):
            whole = self._put_together(replay.plan.fragments[copy.fragment], self._given.pop(copy.round))
            replay.given(copy, learner, GivenContribution(whole, None))

    def _join_first_parameters(self, replay: ReplayServices, rank: int, values: Sequence[FloatArray]) -> None:
        self._first[rank] = list(values)
        if len(self._first) == len(self._ranks):
            parts = replay.plan.fragments
            replay.owned(
                [self._put_together(part, {r: of[part.index] for r, of in self._first.items()}) for part in parts]
            )
            self._first.clear()

    def _put_together(self, fragment: Fragment, parts: dict[int, FloatArray]) -> FloatArray:
        """What ranks send is the front of what they hold."""
        whole = np.empty(fragment.size, np.float32)
        for rank, values in parts.items():
            plan = self._plans[rank]
            plan.scatter(fragment.index, values[: plan.sent(fragment.index).size], whole)
        return whole

    # ---- what the conductor asks ----------------------------------------------------------------------------------

    @property
    def played(self) -> bool:
        return all(rank.played for rank in self._ranks)

    @property
    def resting(self) -> bool:
        return all(rank.resting for rank in self._ranks)

    @property
    def ending(self) -> bool:
        return any(rank.ending for rank in self._ranks)

    @property
    def next_act(self) -> RecordedAction | None:
        """Of the rank that is least far."""
        return min(self._ranks, key=lambda rank: rank.acts_done).next_act

    def act(self) -> Iterator[str]:
        for rank in self._ranks:
            yield from rank.act()

    @property
    def wants_to_go(self) -> bool:
        return all(rank.wants_to_go for rank in self._ranks)

    def go(self) -> None:
        for rank in self._ranks:
            rank.go()

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
