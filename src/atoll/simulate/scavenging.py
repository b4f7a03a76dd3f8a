"""What compute that comes and goes gains: learners that are only there at night.

Work is measured in hours of the learners that are always there. With an extra fraction f of compute there it shrinks
at the rate 1 + f, otherwise at the rate 1. If the share s of the work is done with the extra, a run takes

    (1 − s) + s / (1 + f)

of its time. Published for s = 0.5: 0.90 at +25 %, 0.75 at +100 %. `scavenge` plays a plan of hours and never looks at
this closed form; its tests do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from atoll.protocol.errors import ConfigError

DAY_H = 24.0


class Plan(msgspec.Struct, frozen=True):
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
class Finish:
    after_h: float
    share: float
    """Of the work, done while the extra was there."""


def train_time(extra: float, share: float = 0.5) -> float:
    """As a fraction of the time without any extra."""
    check_extra(extra)
    if not 0 <= share <= 1:
        raise ConfigError(f"share = {share:g} must be from 0 to 1: it is a part of the work")
    return (1 - share) + share / (1 + extra)


def scavenge(work_h: float, extra: float, plan: Plan, start_h: float = 0.0) -> Finish:
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
    return Finish(math.fsum(passed_h), math.fsum(with_extra) / work_h)


def check_extra(extra: float) -> None:
    if not 0 <= extra < math.inf:
        raise ConfigError(f"extra = {extra:g} must not be below 0: it is compute that comes on top, 0.25 for +25 %")
