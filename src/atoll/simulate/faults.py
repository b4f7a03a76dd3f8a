"""Faults as data: when, what, to whom and for how long. A schedule of them can be drawn, printed and made shorter.

Every fault has a beginning and an end. Learners are named by their number, so that a schedule fits any world of as many
learners; the syncer and its disk are there once.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

FaultName = Literal[
    # learners: their processes
    "kill",
    "leave",
    "pause",
    "suspend",
    "slow",
    "courier",
    "second-process",
    "broken",
    "mute",
    "no-save",
    "slow-stream",
    "no-fit",
    "jump",
    # learners: their links
    "reset",
    "partition",
    "partition-up",
    "partition-down",
    "helper",
    # learners: they are asked to leave
    "drain",
    "interrupt",
    # learners: one of several ranks
    "lose-rank",
    "late-rank",
    # everybody's links
    "clog",
    "lossy",
    "doubled",
    # the syncer
    "crash",
    "crash-before",
    "crash-after",
    "power",
    "failover",
    "rival",
    "stop-syncer",
    "jump-syncer",
    "unmergeable",
    "overflow",
    # its other shards
    "kill-shard",
    "crash-shard",
    "partition-shard",
    # relays
    "kill-relay",
    "cut-relay",
    "stop-relay",
    "hide-relay",
    # the syncer's disk
    "disk-full",
    "disk-fails",
    "disk-slow",
    "cuts-fail",
    # the operator
    "set",
    "rollback",
    "end",
]

OF_LEARNERS: tuple[FaultName, ...] = (
    "kill",
    "kill",
    "leave",
    "pause",
    "suspend",
    "suspend",
    "slow",
    "courier",
    "second-process",
    "broken",
    "mute",
    "no-save",
    "slow-stream",
    "no-fit",
    "jump",
    "reset",
    "reset",
    "partition",
    "partition",
    "partition-up",
    "partition-down",
)
TO_LEAVE: tuple[FaultName, ...] = ("drain", "drain", "interrupt")
OF_THE_REST: tuple[FaultName, ...] = (
    "clog",
    "lossy",
    "doubled",
    "crash",
    "crash",
    "crash-before",
    "crash-before",
    "crash-after",
    "crash-after",
    "power",
    "failover",
    "failover",
    "rival",
    "stop-syncer",
    "jump-syncer",
    "unmergeable",
    "overflow",
    "helper",
    "disk-full",
    "disk-fails",
    "disk-slow",
    "cuts-fail",
    "set",
)


class Fault(msgspec.Struct, frozen=True):
    at: float
    kind: FaultName
    target: int = -1
    """The learner's number; −1: the syncer, the disk, or everybody."""
    length: float = 0.0
    """Seconds until it is mended."""
    number: int = 0
    """Which effect after `at` the syncer dies at; what a drawn change changes; whether one that was drained returns."""

    def line(self) -> str:
        whom = f" learner-{self.target}" if self.target >= 0 else ""
        which = f" at effect {self.number}" if self.kind in ("crash-before", "crash-after", "crash-shard") else ""
        return f"{self.at:.3f} {self.kind}{whom}{which} for {self.length:.3f} s"


def draw_faults(dice: random.Random, learners: int, until: float) -> list[Fault]:
    """None, a few or many, some of them close to each other; all are mended before `until`."""
    count = dice.choice([0, 4, 10, 20, 32])
    rest, near = dice.choice([0.2, 0.4, 0.7]), dice.choice([0.0, 0.3, 0.7])
    faults: list[Fault] = []
    for _ in range(count):
        before = faults[-1].at if faults and dice.random() < near else None
        faults.append(_one(dice, learners, until, rest, before))
    if dice.random() < 0.04:
        faults.append(Fault(round(dice.uniform(0.3, 1.0) * until, 3), "end"))
    faults += _drains(dice, learners, until, faults)
    faults += _rollbacks(dice, until)
    return sorted(faults, key=lambda fault: fault.at)


def _one(dice: random.Random, learners: int, until: float, rest: float, before: float | None) -> Fault:
    of_all = dice.random() < rest
    kind = dice.choice(OF_THE_REST if of_all else OF_LEARNERS)
    target = -1 if of_all else dice.randrange(learners)
    at = dice.uniform(0, 0.8 * until) if before is None else min(before + dice.expovariate(0.5), until)
    length = dice.choice([dice.uniform(0, 1), dice.uniform(0, 5), dice.uniform(5, 25)])
    return Fault(round(at, 3), kind, target, round(min(length, until - at), 3), dice.randint(1, 400))


def _drains(dice: random.Random, learners: int, until: float, others: list[Fault]) -> list[Fault]:
    """Drawn last, so older seeds keep their faults; half of all worlds have none."""
    drains: list[Fault] = []
    for _ in range(dice.choice([0, 0, 0, 1, 2, 5])):
        drains.append(_drain(dice, learners, until, [*others, *drains]))
    if drains and dice.random() < 0.1:
        at = drains[-1].at + dice.uniform(-3, 1)
        drains.append(Fault(round(max(0.0, at), 3), "end"))
    return drains


def _rollbacks(dice: random.Random, until: float) -> list[Fault]:
    """Drawn last, so older seeds keep their faults; most worlds have none."""
    times = [dice.uniform(0, until) for _ in range(dice.choice([0, 0, 0, 1, 3]))]
    return [Fault(round(at, 3), "rollback", length=round(dice.uniform(0, until - at), 3)) for at in times]


def _drain(dice: random.Random, learners: int, until: float, others: list[Fault]) -> Fault:
    """At any moment, or close to another fault and then to the same learner: while it is disconnected, has just been
    drained, or is joining."""
    near = dice.choice(others) if others and dice.random() < 0.6 else None
    at = dice.uniform(0, until) if near is None else near.at + dice.uniform(-2, 4)
    at = min(max(at, 0.0), until)
    target = near.target if near is not None and near.target >= 0 else dice.randrange(learners)
    length = dice.choice([dice.uniform(0, 1), dice.uniform(0, 25)])
    return Fault(round(at, 3), dice.choice(TO_LEAVE), target, round(min(length, until - at), 3), dice.randint(1, 400))
