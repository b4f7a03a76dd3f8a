"""A syncer of several shards in a drawn world: how many, and what happens to them. Drawn from a stream of their own."""

from __future__ import annotations

import random

import msgspec

from atoll.simulate.cells import SIZE
from atoll.simulate.faults import Fault, Kind

OF_SHARDS: tuple[Kind, ...] = ("kill-shard", "kill-shard", "crash-shard", "crash-shard", "partition-shard")


class DrawnShards(msgspec.Struct, frozen=True):
    shards: int
    holders: tuple[tuple[int, ...], ...]
    """Per fragment: of small ones not every shard has a part."""

    def find_slice(self, shard: int, fragment: int) -> slice:
        """Which of its values the shard holds."""
        holders = self.holders[fragment]
        if shard not in holders:
            return slice(0, 0)
        place, size = holders.index(shard), SIZE // len(holders)
        return slice(place * size, (place + 1) * size)


def draw_shards(seed: int, fragments: int) -> DrawnShards:
    dice = random.Random(f"shards of {seed}")
    shards = dice.choice([2, 2, 3])
    holders = [(1, *(n for n in range(2, shards + 1) if dice.random() < 0.8)) for _ in range(fragments)]
    if all(len(one) == 1 for one in holders):
        holders[0] = tuple(range(1, shards + 1))
    return DrawnShards(shards, tuple(holders))


def draw_shard_faults(seed: int, until: float) -> list[Fault]:
    dice = random.Random(f"faults of the shards of {seed}")
    return [_one(dice, until) for _ in range(dice.choice([0, 1, 4, 10]))]


def _one(dice: random.Random, until: float) -> Fault:
    at, length = dice.uniform(0, 0.9 * until), dice.choice([dice.uniform(0, 1), dice.uniform(0, 20)])
    return Fault(
        round(at, 3), dice.choice(OF_SHARDS), length=round(min(length, until - at), 3), number=dice.randint(1, 400)
    )
