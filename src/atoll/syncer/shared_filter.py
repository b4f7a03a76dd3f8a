"""The filter of a syncer of several shards (docs/adr/0031): each measures the cuts of its part of the contributions,
the lead judges by all of them, and all use its factors. Only the lead remembers learners, so a shard that comes back
has nothing to learn anew.

Works in the thread that merges a part: every shard of a round tells twice, its figures and then nothing; the lead its
figures and then the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atoll.fabric.wire import MIB
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.deltas import ReadableDelta, as_readable
from atoll.numerics.filter import Filter, FilterVerdict, check_kept, measure_round
from atoll.numerics.merge import Gather, cut_fragment
from atoll.numerics.shard_plan import ShardPlan
from atoll.syncer.parameters import Parameters

MOST_BYTES = 16 * MIB
"""Figures of one part in a message (`Squares`)."""


class SharedFilter(NamedTuple):
    plan: ShardPlan
    shard: int
    round: int
    gather: Gather
    """What all told in this turn, in order, for the lead; for the others what the lead told."""

    def judge(
        self,
        by: Filter,
        fragment: int,
        names: Sequence[str],
        weights: Sequence[float],
        deltas: Sequence[ReadableDelta],
        parameters: Parameters,
        steps: Sequence[int] = (),
    ) -> list[FilterVerdict]:
        """Of the lead; factors are of the pieces of the whole fragment. ValueError: the round is void."""
        told = np.concatenate(self._tell_figures(fragment, deltas, parameters))
        cuts = cut_fragment(self.plan.whole.fragments[fragment])
        judged = by.judge_cuts(fragment, names, told.reshape(len(cuts), -1), self.round, steps)
        factors = [one.factors for one in judged]
        check_kept(factors, weights)
        self.gather(np.concatenate(factors).astype(np.float64))
        return judged

    def hear_factors(self, fragment: int, deltas: Sequence[ReadableDelta], parameters: Parameters) -> list[FloatArray]:
        """Of the others: for the pieces of its part."""
        self._tell_figures(fragment, deltas, parameters)
        (told,) = self.gather(np.empty(0))
        return self.select_factors(fragment, told.astype(np.float32).reshape(len(deltas), -1))

    def select_factors(self, fragment: int, factors: Sequence[FloatArray] | FloatArray) -> list[FloatArray]:
        """Of those of the whole fragment: what this part has."""
        whole = self.plan.whole.fragments[fragment]
        numbers = [whole.find_piece(piece) for piece in self.plan.part(self.shard, fragment).pieces]
        return [one[numbers] for one in factors]

    def _tell_figures(
        self, fragment: int, deltas: Sequence[ReadableDelta], parameters: Parameters
    ) -> Sequence[DoubleArray]:
        part, figures = self.plan.part(self.shard, fragment), np.empty(0)
        if part.size:
            given = [as_readable(part, delta) for delta in deltas]
            first = self.plan.values(self.shard, fragment).start
            momentum = parameters.momentum(fragment)
            figures = measure_round(part, given, momentum, parameters.threads, first, self.round).ravel()
        if figures.nbytes > MOST_BYTES:
            raise ValueError(
                f"robust compares {len(deltas)} contributions to {part.size} values of fragment {fragment}, more than "
                "shards can tell each other: use more fragments or more shards"
            )
        return self.gather(figures)
