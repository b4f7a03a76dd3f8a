"""Compute that joins a run: what it costs the others to take a newcomer in, and what part-time learners gain.

A newcomer needs the weights and the two moments of the inner optimizer: three copies of the model, one after the other
over its link. In elastic data-parallel everybody stands still meanwhile, as the next step needs all of them: 3c steps,
c being the steps that one copy takes.

In Decoupled the others go on training. So what the newcomer was told grows old, and it also needs the fragments that
changed meanwhile: one more copy, counted whole. It may be H rounds behind (the recovery bound), which hides H steps of
all this; what goes beyond is downtime, max(0, 4c − H), counted as steps in which the others stand still for it.
Atoll's learners never do: there a newcomer that is further behind starts over, at last with the syncer's weights only.

Compute that comes and goes (scavenging): work is measured in hours of the learners that are always there. With an extra
fraction f of compute it shrinks at the rate 1 + f, otherwise at the rate 1. If the share s of the work is done with the
extra, a run takes (1 − s) + s / (1 + f) of its time. Published for s = 0.5: 0.90 at +25 %, 0.75 at +100 %.

`grow` and `scavenge` play this as it happens and never look at the closed forms; their tests do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from atoll.estimate.bandwidth import above_0
from atoll.protocol.errors import ConfigError

UpsizingMethod = Literal["elastic-data-parallel", "decoupled"]
METHODS: tuple[UpsizingMethod, ...] = get_args(UpsizingMethod)
STATE = ("weights", "first moment", "second moment")
"""What a newcomer needs, each as large as the model."""
CHANGED = "fragments that changed"


@dataclass(frozen=True, slots=True)
class CopyPeriod:
    """A time in which one copy is on the link and the others do one thing."""

    start: float
    """In steps since the newcomer came."""
    steps: float
    """How long it lasts."""
    copy: str
    training: bool
    """The others; otherwise they stand still."""


def steps_per_copy(gbit: float, gbit_s: float, step_s: float) -> float:
    """c: the steps in which a link carries one copy of the model."""
    for name, value in (("the model's size", gbit), ("gbit_s", gbit_s), ("step_s", step_s)):
        above_0(name, value)
    return gbit / (gbit_s * step_s)


def grow(method: UpsizingMethod, copy_steps: float, sync_every: int) -> list[CopyPeriod]:
    """Everything that happens from the moment a newcomer comes until it trains."""
    above_0("copy_steps", copy_steps)
    if sync_every < 1:
        raise ConfigError(f"sync_every = {sync_every} is too small: the least is 1")
    queue = [*STATE, CHANGED] if method == "decoupled" else [*STATE]
    may_lag = float(sync_every) if method == "decoupled" else 0.0
    now = behind = 0.0
    story = []
    for copy in queue:
        left = copy_steps
        while left > 0:
            training = behind < may_lag
            passed = min(left, may_lag - behind) if training else left
            story.append(CopyPeriod(now, passed, copy, training))
            now, left = now + passed, left - passed
            behind = min(may_lag, behind + passed)
    return story


def downtime_steps(story: list[CopyPeriod]) -> float:
    """The steps in which the others stand still."""
    return math.fsum(stretch.steps for stretch in story if not stretch.training)


# ---- compute that comes and goes -----------------------------------------------------------------------------------

DAY_H = 24.0


class DailyHours(msgspec.Struct, frozen=True):
    """The hours of every day in which the extra learners are there; over midnight where it ends before it begins."""

    begins_h: float
    ends_h: float

    def __post_init__(self) -> None:
        for hour in (self.begins_h, self.ends_h):
            if not 0 <= hour <= DAY_H:
                raise ConfigError(f"there is no hour {hour:g} in a day: take 0 to 24")
        if self.begins_h % DAY_H == self.ends_h % DAY_H and (self.begins_h, self.ends_h) != (0, DAY_H):
            raise ConfigError(f"hours {self.begins_h:g}-{self.ends_h:g} are no time at all: for all day, write 0-24")

    def there(self, hour: float) -> bool:
        """Whether the extra is there at an hour of the day."""
        if self.begins_h < self.ends_h:
            return self.begins_h <= hour < self.ends_h
        return hour >= self.begins_h or hour < self.ends_h

    def next_change(self, hour: float) -> float:
        """The hour of the day at which somebody comes or goes, or the day ends."""
        return min(change for change in (self.begins_h, self.ends_h, DAY_H) if change > hour)


@dataclass(frozen=True, slots=True)
class ScavengedRun:
    after_h: float
    share: float
    """Of the work, done while the extra was there."""


def train_time(extra: float, share: float = 0.5) -> float:
    """As a fraction of the time without any extra."""
    check_extra(extra)
    if not 0 <= share <= 1:
        raise ConfigError(f"share = {share:g} must be from 0 to 1: it is a part of the work")
    return (1 - share) + share / (1 + extra)


def scavenge(work_h: float, extra: float, plan: DailyHours, start_h: float = 0.0) -> ScavengedRun:
    """Play a run that begins at an hour of the day, until its work is done."""
    check_extra(extra)
    if not 0 < work_h <= 1e6:
        raise ConfigError(f"work_h = {work_h:g} must be above 0 and at most a million hours")
    left, hour, passed_h, with_extra = work_h, start_h % DAY_H, [], []
    while left > 0:
        there, change = plan.there(hour), plan.next_change(hour)
        rate = 1 + extra if there else 1.0
        done = min(left, rate * (change - hour))
        passed_h.append(done / rate)
        with_extra.append(done if there else 0.0)
        left, hour = left - done, change % DAY_H
    return ScavengedRun(math.fsum(passed_h), math.fsum(with_extra) / work_h)


def check_extra(extra: float) -> None:
    if not 0 <= extra < math.inf:
        raise ConfigError(f"extra = {extra:g} must not be below 0: it is compute that comes on top, 0.25 for +25 %")
