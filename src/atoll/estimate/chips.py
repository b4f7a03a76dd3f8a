"""One learner's life on its chips: stepping, losing slices, scaling down and up, standing still.

Event-driven: healthy steps pass in one stretch however many chips make them, so time is spent on failures alone. Rules:
- chip failures strike while steps are made, so many by Poisson in a step; whatever their number, the learner scales
  down once after that step; the slices return after a time drawn for each, and those that are back at a boundary
  are taken in by one scaling up;
- preemptions, racks and regions strike by the clock on the wall, and are noticed at the next boundary;
- without elasticity a failing chip stops everything for `outage_s`; slices that were taken away stop it until they
  are all back;
- a learner that had lost every slice recovers before its first step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from atoll.estimate.profile import Failures, Profile

ActivityKind = Literal["stepping", "scaling down", "scaling up", "outage", "gone", "recovering", "waiting", "away"]
DAY_S = 86_400.0
SHORTEST = 0.05
"""Of a jittered step, as a share of the usual."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """What a learner did from one moment to another."""

    start: float
    end: float
    kind: ActivityKind
    share: float = 0.0
    """Of its slices that were there."""
    useful: float = 0.0
    """The share of that time which was worth a step: `share`, less what chips idle in it."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Strike:
    """A region is gone."""

    at: float
    for_s: float


@dataclass(frozen=True, slots=True)
class ChipPlan:
    """The hours of a day in which a scavenged learner is there."""

    from_h: float
    to_h: float

    def change(self, now: float) -> tuple[bool, float]:
        """Whether it is there now, and when that changes."""
        hour = now % DAY_S / 3600
        there = self.from_h <= hour < self.to_h if self.from_h < self.to_h else not self.to_h <= hour < self.from_h
        return there, now + ((self.to_h if there else self.from_h) - hour) % 24 * 3600


@dataclass(slots=True)
class Chips:
    profile: Profile
    slices: int
    chips: float
    """Of this learner, all its slices together."""
    dice: random.Random
    elastic: bool = True
    slowness: float = 1.0
    """How long its steps take, as a multiple of the usual."""
    own_slowness: float | None = None
    """The same of its own parts on average, where `slowness` is that of the slowest among them."""
    plan: ChipPlan | None = None
    regional: Sequence[Strike] = ()
    failures: int = 0
    lost_slices: int = 0
    present: int = field(init=False)
    _back: list[tuple[float, int]] = field(default_factory=list)
    """When so many slices return."""
    _costs: list[tuple[ActivityKind, float]] = field(default_factory=list)
    """What is to be stood through before the next step."""
    _boundary: bool = True
    """A step is behind it: slices that left or came back are noticed now, and not while it scales down or up."""
    _next_strike: float = math.inf
    _next_region: int = 0
    _steps: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """By the slices present: seconds of a step, the useful share of it, and the mean failures in it."""

    def __post_init__(self) -> None:
        self.present = self.slices

    def settle(self, since: float) -> TimeSpan:
        """Begin at a moment below 0 and live to 0; what it is in the middle of then, from 0 on."""
        self._next_strike = self._strike_after(since)
        stretch = self.next(since, 0.0)
        while stretch.end < 0.0:
            stretch = self.next(stretch.end, 0.0)
        self.failures = 0
        return TimeSpan(0.0, stretch.end, stretch.kind, stretch.share, stretch.useful)

    def start(self, start_s: float) -> TimeSpan:
        """Begin at 0, with everything there."""
        self._next_strike = self._strike_after(0.0)
        return TimeSpan(0.0, start_s, "recovering")

    def next(self, now: float, until: float = math.inf) -> TimeSpan:
        """What it does from now on, for a while."""
        return self.standing(now, until) or self.step(now, until)

    def standing(self, now: float, until: float = math.inf) -> TimeSpan | None:
        """What it has to stand through before its next step; None if it may begin one."""
        if self.plan is not None:
            there, change = self.plan.change(now)
            if not there:
                self._come_anew(change)
                return TimeSpan(now, min(change, until), "away")
        if self._boundary:
            self._take_strikes(now)
            self._take_returns(now)
            self._boundary = False
        if self.present == 0 or (not self.elastic and self.present < self.slices):
            self._boundary = True
            self._costs = [("recovering", self._recovery_s)]
            return TimeSpan(now, min(self._back[0][0], until), "gone")
        if self._costs:
            kind, seconds = self._costs.pop(0)
            return TimeSpan(now, now + seconds, kind)
        return None

    def step(self, now: float, until: float = math.inf, most: float = math.inf) -> TimeSpan:
        """So many steps as nothing happens in, up to the first with a failure and at most `most`."""
        step_s, useful, mean = self._steps.get(self.present) or self._measure()
        failing = _steps_to_failure(self.dice, mean)
        event = min(self._next_event(), until, math.inf if self.plan is None else self.plan.change(now)[1])
        steps = max(1, min(failing, most, math.ceil((event - now) / step_s) if event < math.inf else math.inf))
        assert steps < math.inf, "a learner that nothing happens to needs an end"
        self._boundary = True
        end, share = now + self._lasting(steps, step_s), self.present / self.slices
        if failing <= steps:
            self._fail(end, _at_least_one(self.dice, mean))
        return TimeSpan(now, end, "stepping", share, useful, int(steps))

    @property
    def _recovery_s(self) -> float:
        elasticity = self.profile.elasticity
        return elasticity.recover_s if self.elastic else elasticity.outage_s

    # ---- steps --------------------------------------------------------------------------------------------------

    def _measure(self) -> tuple[float, float, float]:
        speed, share = self.profile.speed, self.present / self.slices
        slowest = 1.0 + speed.chip_jitter * _slowest_of(self.chips * share)
        step_s = self.profile.step_s * self.slowness * slowest
        own = self.slowness if self.own_slowness is None else self.own_slowness
        useful = share * (1.0 - speed.idle) * own / (self.slowness * slowest)
        found = (step_s, useful, self.chips * share * step_s / self.profile.failures.mtbi_s)
        self._steps[self.present] = found
        return found

    def _lasting(self, steps: float, step_s: float) -> float:
        """So many steps, each with its jitter: their sum is drawn at once."""
        if not (jitter := self.profile.speed.jitter):
            return steps * step_s
        return step_s * max(SHORTEST * steps, steps + jitter * math.sqrt(steps) * self.dice.gauss(0.0, 1.0))

    # ---- failures and returns -----------------------------------------------------------------------------------

    def _fail(self, now: float, count: int) -> None:
        self.failures += 1
        if self.elastic:
            self._lose(now, min(count, self.present), None)
            self._redraw(now)
        else:
            self._costs.append(("outage", self.profile.elasticity.outage_s))

    def _lose(self, now: float, count: int, for_s: float | None) -> None:
        """So many slices, all for the same time or each for its own."""
        if count == 0:
            return
        self.lost_slices += count
        self.present -= count
        if for_s is not None:
            heappush(self._back, (now + for_s, count))
        else:
            for _ in range(count):
                heappush(self._back, (now + return_s(self.profile.failures, self.dice), 1))
        if self.elastic and ("scaling down", self.profile.elasticity.down_s) not in self._costs:
            self._costs.append(("scaling down", self.profile.elasticity.down_s))

    def _take_returns(self, now: float) -> None:
        before = self.present
        while self._back and self._back[0][0] <= now:
            self.present += heappop(self._back)[1]
        if self.present > before:
            if self.elastic and before > 0:
                self._costs.append(("scaling up", self.profile.elasticity.up_s))
            self._redraw(now)

    def _come_anew(self, at: float) -> None:
        """Whoever was away comes back whole, and recovers; what struck meanwhile did not strike it."""
        self.present, self._back, self._costs = self.slices, [], [("recovering", self._recovery_s)]
        self._next_strike = self._strike_after(at)
        self._next_region = sum(strike.at <= at for strike in self.regional)

    # ---- strikes by the clock on the wall -----------------------------------------------------------------------

    def _next_event(self) -> float:
        region = self.regional[self._next_region].at if self._next_region < len(self.regional) else math.inf
        return min(self._back[0][0] if self._back else math.inf, self._next_strike, region)

    def _rates(self) -> tuple[float, float]:
        """Per second: of preemptions, of racks."""
        preemption, racks = self.profile.preemption, self.profile.racks
        preempted = self.present / preemption.every_s if preemption.every_s else 0.0
        per_rack = self.slices / racks.slices / racks.mtbi_s if racks.slices and racks.mtbi_s else 0.0
        return preempted, per_rack

    def _strike_after(self, now: float) -> float:
        """Memoryless, so it may be drawn anew whenever the number of slices has changed."""
        rate = sum(self._rates())
        return now + self.dice.expovariate(rate) if rate > 0 else math.inf

    def _redraw(self, now: float) -> None:
        """Another number of slices is there; what has struck already stays."""
        if self._next_strike > now:
            self._next_strike = self._strike_after(now)

    def _take_strikes(self, now: float) -> None:
        while self._next_strike <= now:
            at = self._next_strike
            preempted, per_rack = self._rates()
            if self.dice.random() * (preempted + per_rack) < preempted:
                self._lose(at, min(1, self.present), self.dice.expovariate(1 / self.profile.preemption.for_s))
            else:
                racks = self.profile.racks
                self._lose(at, min(racks.slices, self.present), self.dice.expovariate(1 / racks.repair_s))
            self.failures += 1
            self._next_strike = self._strike_after(at)
        while self._next_region < len(self.regional) and self.regional[self._next_region].at <= now:
            strike = self.regional[self._next_region]
            self._next_region += 1
            self.failures += 1
            self._lose(strike.at, self.present, strike.for_s)


def return_s(failures: Failures, dice: random.Random) -> float:
    """After which time a slice returns: x = scale·(−ln(1 − u^(1/a)))^(1/c), or one of those that were measured."""
    if failures.observed_s:
        return dice.choice(failures.observed_s)
    u = dice.random()
    return failures.scale_s * float((-math.log1p(-(u ** (1 / failures.shape_a)))) ** (1 / failures.shape_c))


def strikes(every_s: float, for_s: float, since: float, until: float, dice: random.Random) -> list[Strike]:
    """One region's, from one moment to another."""
    found: list[Strike] = []
    now = since + dice.expovariate(1 / every_s) if every_s else math.inf
    while now < until:
        found.append(Strike(now, dice.expovariate(1 / for_s)))
        now += found[-1].for_s + dice.expovariate(1 / every_s)
    return found


def _steps_to_failure(dice: random.Random, mean: float) -> float:
    """Which step is the first with a failure, when each has `mean` of them: geometric with p = 1 − e^−mean."""
    return math.inf if mean <= 0 else 1 + math.floor(-math.log(1.0 - dice.random()) / mean)


def _at_least_one(dice: random.Random, mean: float) -> int:
    """Poisson, given that it is not 0; where there are many, normal will do."""
    if mean > 50:
        return max(1, round(dice.gauss(mean, math.sqrt(mean))))
    u = math.exp(-mean) + dice.random() * -math.expm1(-mean)
    count, probability, sum_ = 0, math.exp(-mean), math.exp(-mean)
    while u > sum_ and probability > 0.0:
        count += 1
        probability *= mean / count
        sum_ += probability
    return max(1, count)


def _slowest_of(chips: float) -> float:
    """The mean of the largest of so many standard normals (Gumbel's limit; 0 for a single one)."""
    if chips < 2:
        return 0.0
    b = math.sqrt(2 * math.log(chips))
    return max(0.56, b - (math.log(math.log(chips)) + math.log(4 * math.pi)) / (2 * b) + 0.5772156649 / b)
