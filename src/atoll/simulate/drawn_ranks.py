"""Learners of several ranks in a drawn world: how many ranks each has, how they share the model, what happens to them.

Drawn from a stream of their own: settings, hosts, links and all other faults of a seed are what they are without ranks.
"""

from __future__ import annotations

import random

import msgspec

from atoll.simulate.cells import LAYOUTS, CellModel, Layout
from atoll.simulate.faults import Fault, Kind
from atoll.simulate.ranked_learner import RankLayout

OF_RANKS: tuple[Kind, ...] = ("lose-rank", "late-rank", "late-rank")


class DrawnRanks(msgspec.Struct, frozen=True):
    counts: tuple[int, ...]
    """Per learner; 1: it is a plain one."""
    layouts: tuple[Layout, ...]
    delay_s: float
    most_copies: int

    def make_layouts(self, model: CellModel) -> dict[str, RankLayout]:
        """By learner, of those that have several."""
        return {
            f"learner-{number}": RankLayout(
                model.make_boxes(count, self.layouts[number]), self.delay_s, self.most_copies
            )
            for number, count in enumerate(self.counts)
            if count > 1
        }


def draw_ranks(seed: int, learners: int, fragments: int) -> DrawnRanks:
    """At least one learner has several."""
    dice = random.Random(f"ranks of {seed}")
    counts = [dice.choice([1, 2, 2, 3, 4]) for _ in range(learners)]
    if max(counts) == 1:
        counts[dice.randrange(learners)] = dice.randint(2, 4)
    return DrawnRanks(
        tuple(counts),
        tuple(dice.choice(LAYOUTS) for _ in counts),
        delay_s=dice.choice([0.0, 0.001, 0.02, 0.3]),
        most_copies=dice.choice([2 * fragments + 2, 64]),
    )


def draw_rank_faults(seed: int, learners: int, until: float) -> list[Fault]:
    dice = random.Random(f"faults of the ranks of {seed}")
    return [_one(dice, learners, until) for _ in range(dice.choice([0, 1, 3, 8]))]


def _one(dice: random.Random, learners: int, until: float) -> Fault:
    at, length = dice.uniform(0, 0.9 * until), dice.choice([dice.uniform(0, 1), dice.uniform(0, 8)])
    target, number = dice.randrange(learners), dice.randint(1, 400)
    return Fault(round(at, 3), dice.choice(OF_RANKS), target, round(min(length, until - at), 3), number)
