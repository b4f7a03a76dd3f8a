"""Failures drawn from the goodput model, as a tape that `atoll train --tape` follows.

The learners' lives are those of the goodput simulator (chips.py); the shipped protocol runs the rounds between them
(cluster_world.py), and what every training process was told is kept (simulate/scenario.py). Real training processes
know whole steps only, so:
- a learner that scales down or up makes no steps meanwhile, and goes on with what it has;
- one without some of its slices makes whole steps, but fewer: as many as its slices are worth;
- one that lost every slice is gone. Another process takes its place, recovers, and goes on with the newest parameters.
So the share of its steps that a run under the tape makes is the goodput (with speeds that do not differ).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from atoll.estimate.chips import TimeSpan
from atoll.estimate.cluster_world import NEVER_S, WITHIN, ClusterWorld, settings_of
from atoll.estimate.goodput import MOST_HOURS, Job, begin_lives, count, draw_learners
from atoll.estimate.profile import Profile
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner import effects as fx
from atoll.protocol.records import Absence, AnyRecord, DrawnRecord
from atoll.simulate.scenario import TapeWorld
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.training import Training

MOST_STEPS = 500_000
CLOSE = 1e-6
"""Of a step: what floating-point sums of times may be off by."""


class DrawnWorld(TapeWorld, ClusterWorld):
    """A cluster whose training processes make whole steps, and a tape of what they are told."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._worth = dict.fromkeys(self.chips, 0.5)
        """What a learner has done of its next step: half of it at first, so that on average nothing is rounded off."""
        self.ends: dict[str, list[float]] = {name: [] for name in self.chips}
        """When each learner's steps ended."""
        self.stopped_at = math.inf
        """When the first learner was told that the run is over."""

    def end_step(self, name: str) -> float:
        while (end := super().end_step(name)) < NEVER_S:
            self._worth[name] += self.lives[name][-1].share
            if self._worth[name] >= 1.0 - CLOSE:
                self._worth[name] -= 1.0
                return end
        return end

    def on_step(self, learner: Training) -> None:
        super().on_step(learner)
        if learner.t > 0:
            self.ends[learner.name].append(self.now)

    def on_learner_event(
        self, learner: SimulatedLearner, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]
    ) -> None:
        if isinstance(event, fx.Stepped) and event.stopped:
            self.stopped_at = min(self.stopped_at, self.now)
        super().on_learner_event(learner, event, effects)


def draw_tape(
    name: str, profile: Profile, *, learners: int, chips: int, steps: int, seed: int, warm_start: float = 0.0
) -> list[AnyRecord]:
    """The records of a run of so many steps, under failures drawn by the seed. The second is a DrawnRecord."""
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"--steps {steps}: a tape needs an end; give it 1 to {MOST_STEPS:,}")
    hours = min(MOST_HOURS, WITHIN * steps * profile.step_s / 3600)
    job = Job(profile, "decoupled", learners, chips, seed, hours, rounds=0)
    drawn = draw_learners(job)
    lives = begin_lives(job, drawn)
    for one, life in zip(drawn, lives, strict=True):  # no process is started for a learner that cannot step yet
        while (span := one.standing(life[-1].end)) is not None:
            life.append(span)
    settings = msgspec.structs.replace(settings_of(profile, len(drawn)), steps=steps, warm_start=warm_start)
    world = DrawnWorld(profile, settings.resolved(settings.fragments), drawn, lives, seed)
    begun, *lines = world.play_to_the_end()
    return [begun, _make_head(job, name, world), *lines]


def _make_head(job: Job, profile: str, world: DrawnWorld) -> DrawnRecord:
    step_s, span_s = job.profile.step_s, min(world.stopped_at, world.now)
    ticks = _nearest_tick(span_s, step_s) + 1
    for life in world.lives.values():
        if life[-1].end < span_s:  # it has come back, and made no step yet
            life.append(TimeSpan(life[-1].end, span_s, "recovering"))
    absences = [
        one for name, ends in world.ends.items() for one in list_absences(name, ends, world.lives[name], ticks, step_s)
    ]
    return DrawnRecord(
        profile,
        job.profile.provenance,
        len(world.lives),
        job.chips,
        job.seed,
        step_s,
        ticks,
        count(list(world.lives.values()), span_s, step_s).goodput,
        tuple(absences),
    )


def list_absences(
    name: str, ends: Sequence[float], life: Sequence[TimeSpan], ticks: int, step_s: float
) -> list[Absence]:
    """The ticks that none of its steps is the nearest to, those in a row together. Of two steps in one tick, which
    jitter may bring about, the second counts in the next."""
    ended = Counter(_nearest_tick(end, step_s) for end in ends)
    found: list[Absence] = []
    waiting = 0
    for tick in range(ticks):
        waiting += ended[tick]
        if waiting:
            waiting -= 1
        elif found and found[-1].tick + found[-1].ticks == tick:
            found[-1] = msgspec.structs.replace(found[-1], ticks=found[-1].ticks + 1)
        else:
            found.append(Absence(name, tick, 1, ""))
    return [msgspec.structs.replace(one, reason=_reason(one, life, step_s)) for one in found]


def _nearest_tick(end: float, step_s: float) -> int:
    """The one whose end is nearest."""
    return math.floor(end / step_s - 0.5 - CLOSE)


def _reason(absence: Absence, life: Sequence[TimeSpan], step_s: float) -> str:
    """What took most of the time from the step before to the one behind, other than steps; if nothing did, why these
    took longer."""
    start, end = (absence.tick - 0.5) * step_s, (absence.tick + absence.ticks + 0.5) * step_s
    seconds: Counter[str] = Counter()
    slices = True
    for span in life:
        lasting = min(span.end, end) - max(span.start, start)
        if lasting > 0 and span.kind != "stepping":
            seconds[span.kind] += lasting  # type: ignore[assignment]
        elif lasting > 0:
            slices = slices and span.share == 1.0
    return seconds.most_common(1)[0][0] if seconds else "slow steps" if slices else "missing slices"
