"""What worlds have beside plain learners and one syncer, as a seed draws it: ranks of a learner, shards of the syncer,
links of a width, relays of a region, and what happens to them.

Each is drawn from a stream of its own: settings, hosts, links and all other faults of a seed are what they are without.
"""

from __future__ import annotations

import random

import msgspec

from atoll.simulate.cells import LAYOUTS, SIZE, CellModel, RankSplit
from atoll.simulate.faults import Fault, FaultName
from atoll.simulate.ranked_learner import RankLayout

OF_RANKS: tuple[FaultName, ...] = ("lose-rank", "late-rank", "late-rank")
OF_SHARDS: tuple[FaultName, ...] = ("kill-shard", "kill-shard", "crash-shard", "crash-shard", "partition-shard")
OF_RELAYS: tuple[FaultName, ...] = ("kill-relay", "kill-relay", "cut-relay", "stop-relay", "hide-relay")


# ---- ranks -----------------------------------------------------------------------------------------------------------


class DrawnRanks(msgspec.Struct, frozen=True):
    counts: tuple[int, ...]
    """Per learner; 1: it is a plain one."""
    layouts: tuple[RankSplit, ...]
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
        most_copies=dice.choice([fragments + 1, 64]),
    )


def draw_rank_faults(seed: int, learners: int, until: float) -> list[Fault]:
    dice = random.Random(f"faults of the ranks of {seed}")
    return [_draw_rank_fault(dice, learners, until) for _ in range(dice.choice([0, 1, 3, 8]))]


def _draw_rank_fault(dice: random.Random, learners: int, until: float) -> Fault:
    at, length = dice.uniform(0, 0.9 * until), dice.choice([dice.uniform(0, 1), dice.uniform(0, 8)])
    target, number = dice.randrange(learners), dice.randint(1, 400)
    return Fault(round(at, 3), dice.choice(OF_RANKS), target, round(min(length, until - at), 3), number)


# ---- shards ----------------------------------------------------------------------------------------------------------


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
    return [_draw_fault(dice, OF_SHARDS, until) for _ in range(dice.choice([0, 1, 4, 10]))]


def _draw_fault(dice: random.Random, kinds: tuple[FaultName, ...], until: float) -> Fault:
    at, length = dice.uniform(0, 0.9 * until), dice.choice([dice.uniform(0, 1), dice.uniform(0, 20)])
    return Fault(
        round(at, 3), dice.choice(kinds), length=round(min(length, until - at), 3), number=dice.randint(1, 400)
    )


# ---- links ----------------------------------------------------------------------------------------------------------


class DrawnLinks(msgspec.Struct, frozen=True):
    up_bytes: float
    down_bytes: float
    rates: tuple[tuple[float, float], ...]
    """Per learner, bytes per second up and down."""
    changes: tuple[tuple[float, int, float, float], ...]
    """Changes of a link: time, number of the learner, bytes per second up and down."""
    calm: bool
    """Whether nothing else happens, so that links are steady for long."""

    @property
    def slowest_s(self) -> float:
        """Longest time that a body takes on any of them."""
        rates = [*self.rates, *(change[2:] for change in self.changes)]
        return max(max(self.up_bytes / up, self.down_bytes / down) for up, down in rates)


def draw_links(seed: int, learners: int, until: float) -> DrawnLinks:
    """Draw the links: most are equally wide, some are narrower or wider, and some change."""
    dice = random.Random(f"links of {seed}")
    up_bytes, down_bytes = 1e6, dice.choice([1e6, 2e6])
    usual = up_bytes / dice.choice([0.05, 0.2, 0.6, 1.2])
    rates = [_draw_rates(dice, usual) for _ in range(learners)]
    changes = [
        (round(dice.uniform(0.1, 0.7) * until, 3), dice.randrange(learners), *_draw_rates(dice, usual))
        for _ in range(dice.choice([0, 0, 1, 3]))
    ]
    return DrawnLinks(up_bytes, down_bytes, tuple(rates), tuple(changes), calm=dice.random() < 0.5)


def _draw_rates(dice: random.Random, usual: float) -> tuple[float, float]:
    times = dice.choice([1.0, 1.0, 1.0, 0.25, 0.6, dice.uniform(0.8, 1.2), 4.0])
    return times * usual, times * usual * dice.choice([1.0, 1.0, 2.0])


# ---- relays ----------------------------------------------------------------------------------------------------------


class DrawnRelays(msgspec.Struct, frozen=True):
    relays: int
    regions: tuple[int, ...]
    """Per learner, the number of its relay; −1: it has none."""
    sum_s: float
    """What a relay takes to make a sum."""

    def find_relay(self, learner: str) -> int:
        number = int(learner.removeprefix("learner-"))
        return self.regions[number] if number < len(self.regions) else -1


def draw_relays(seed: int, learners: int) -> DrawnRelays:
    """Most learners have one."""
    dice = random.Random(f"relays of {seed}")
    relays = dice.choice([1, 1, 2])
    regions = [-1 if dice.random() < 0.15 else dice.randrange(relays) for _ in range(learners)]
    if max(regions) < 0:
        regions[dice.randrange(learners)] = 0
    return DrawnRelays(relays, tuple(regions), sum_s=dice.choice([0.0, 0.01, 0.3]))


def draw_relay_faults(seed: int, until: float) -> list[Fault]:
    dice = random.Random(f"faults of the relays of {seed}")
    return [_draw_fault(dice, OF_RELAYS, until) for _ in range(dice.choice([0, 2, 5, 12]))]
