"""Goodput of a cluster under failures. A job is a method, so many learners on so many chips, and a seed; a cell of the
table is what several seeds come to.

Goodput is the share of the allocated learner-seconds spent on useful steps; a step with fewer slices counts less.
Uptime is the share of time in which at least one learner stepped, liveness the mean share of learners that were there
and recovered. Hours in which a scavenged learner is away are not allocated. `lost` says where the rest went.

`python -m atoll.estimate.goodput` is a worker: jobs in, one a line, outcomes out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Literal, get_args

import msgspec

from atoll.estimate.chips import ActivityKind, ChipPlan, Chips, Strike, TimeSpan, strikes
from atoll.estimate.cluster_world import ClusterWorld, PlayedRounds, settings_of
from atoll.estimate.profile import Profile
from atoll.protocol.errors import ConfigError
from atoll.simulate import worker_pool

Method = Literal["data-parallel", "elastic-data-parallel", "synchronous-diloco", "streaming-diloco", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)
ALONE: frozenset[Method] = frozenset({"data-parallel", "elastic-data-parallel"})
"""One learner: the whole cluster steps together."""
MOST_CHIPS, MOST_HOURS = 10**12, 10**6
WAITING: frozenset[Method] = frozenset({"synchronous-diloco", "streaming-diloco"})
"""Learners wait for rounds, so all of the time is played round by round."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % in the middle, by degrees of freedom from 1 on."""


# ---- what became of the time --------------------------------------------------------------------------------------

DEAD: frozenset[ActivityKind] = frozenset({"gone", "recovering", "outage"})
STANDING: tuple[ActivityKind, ...] = tuple(kind for kind in get_args(ActivityKind) if kind not in ("stepping", "away"))
LOSSES = ("missing slices", "idle in steps", *STANDING)
"""The first two are lost while stepping."""


class Tally(msgspec.Struct, frozen=True):
    goodput: float
    uptime: float
    liveness: float
    learner_steps: float
    """Useful steps of all learners together, in steps of a whole learner."""
    lost: dict[str, float]
    """By reason, as shares of the allocated time."""


def count(lives: Sequence[Sequence[TimeSpan]], span_s: float, step_s: float) -> Tally:
    useful = there = allocated = 0.0
    lost = dict.fromkeys(LOSSES, 0.0)
    for stretch in (one for life in lives for one in life):
        seconds = min(stretch.end, span_s) - stretch.start
        if seconds <= 0 or stretch.kind == "away":
            continue
        allocated += seconds
        there += 0.0 if stretch.kind in DEAD else seconds
        if stretch.kind == "stepping":
            useful += seconds * stretch.useful
            lost["missing slices"] += seconds * (1 - stretch.share)
            lost["idle in steps"] += seconds * (stretch.share - stretch.useful)
        else:
            lost[stretch.kind] += seconds
    whole = allocated or 1.0
    return Tally(
        goodput=useful / whole,
        uptime=stepping_s(lives, span_s) / span_s,
        liveness=there / whole,
        learner_steps=useful / step_s,
        lost={reason: seconds / whole for reason, seconds in lost.items() if seconds > 0},
    )


def stepping_s(lives: Sequence[Sequence[TimeSpan]], span_s: float) -> float:
    """Seconds in which at least one learner stepped."""
    spans = sorted((one.start, one.end) for life in lives for one in life if one.kind == "stepping")
    total = reached = 0.0
    for start, end in spans:
        end = min(end, span_s)
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


# ---- one job --------------------------------------------------------------------------------------------------------


class Job(msgspec.Struct, frozen=True):
    profile: Profile
    method: Method
    learners: int
    chips: int
    seed: int
    hours: float
    rounds: int
    """How many are played through the protocol; where nobody waits, the rest of the time needs no rounds."""
    absences: tuple[tuple[Strike, ...], ...] = ()
    """Of each learner, when it is taken away as a whole: given, as by a spot trace, and not drawn."""

    def __post_init__(self) -> None:
        slices = self.profile.slices
        for name, value, most in (
            ("learners", self.learners, slices),
            ("chips", self.chips, MOST_CHIPS),
            ("hours", self.hours, MOST_HOURS),
        ):
            if not 0 < value <= most:
                raise ConfigError(f"{name} = {value:g}: it must be above 0, and at most {most:,}")
        if self.chips < self.learners:
            raise ConfigError(f"{self.chips} chips are too few for {self.learners} learners: each needs at least one")
        if self.chips < slices:
            raise ConfigError(f"{self.chips} chips cannot make {slices} slices: take --slices {self.chips} or fewer")
        if slices % self.learners:
            near = min((n for n in range(1, slices + 1) if slices % n == 0), key=lambda n: abs(n - self.learners))
            raise ConfigError(
                f"{slices} slices cannot be dealt evenly to {self.learners} learners: "
                f"take --learners {near}, or --slices {slices - slices % self.learners or self.learners}"
            )
        if self.profile.rules.quorum > self.learners and self.method not in ALONE:
            raise ConfigError(
                f"a quorum of {self.profile.rules.quorum} can never be reached by {self.learners} learners"
            )
        if self.absences and (self.method in ALONE or len(self.absences) != self.learners):
            raise ConfigError(f"absences of {len(self.absences)} learners do not suit {self.learners} by {self.method}")


class JobResult(msgspec.Struct, frozen=True):
    tally: Tally
    rounds: PlayedRounds | None
    failures_per_hour: float
    tokens_per_hour: float


def run(job: Job) -> JobResult:
    return live(job)[0]


def live(job: Job) -> tuple[JobResult, list[list[TimeSpan]]]:
    """The experiment, and every learner's life in it."""
    learners = draw_learners(job)
    span_s = job.hours * 3600
    lives = begin_lives(job, learners)
    rounds = _play(job, learners, lives, span_s)
    if job.method in WAITING and rounds is not None:
        span_s = min(span_s, rounds.seconds)
    else:
        for chips, life in zip(learners, lives, strict=True):
            _live_on(chips, life, span_s)
    tally = count(lives, span_s, job.profile.step_s)
    seconds = tally.learner_steps * job.profile.step_s
    tokens = seconds * (job.chips / job.learners) * job.profile.tokens_per_chip_s
    failures = sum(one.failures for one in learners)
    return JobResult(tally, rounds, failures / span_s * 3600, tokens / span_s * 3600), lives


def begin_lives(job: Job, learners: Sequence[Chips]) -> list[list[TimeSpan]]:
    """In the middle of things, or with the start of a run where it was measured how that goes."""
    starts, since = job.profile.elasticity.start_s, -job.profile.settled_s
    return [[chips.start(chips.dice.choice(starts)) if starts else chips.settle(since)] for chips in learners]


def draw_learners(job: Job) -> list[Chips]:
    """The learners, each with its chips, its speed and its own dice; those of a region share what strikes it."""
    profile, alone = job.profile, job.method in ALONE
    dice = random.Random(f"{job.seed}/{job.method}/{job.learners}/{job.chips}")
    regions = [
        strikes(profile.regions.mtbi_s, profile.regions.repair_s, -profile.settled_s, job.hours * 3600, dice)
        for _ in range(profile.regions.count)
    ]
    if alone:  # one learner that lies in every region: it has what strikes any of them
        everywhere = sorted((one for region in regions for one in region), key=lambda one: one.at)
        return [_draw_learner(job, dice, 1.0 + profile.speed.spread, 1.0 + profile.speed.spread / 2, None, everywhere)]
    extra, plan = profile.scavenged, ChipPlan(profile.scavenged.from_h, profile.scavenged.to_h)

    def list_strikes(number: int) -> list[Strike]:
        given = job.absences[number] if number < len(job.absences) else ()
        return sorted((*regions[number % len(regions)], *given), key=lambda one: one.at)

    return [
        _draw_learner(
            job, dice, _slowness(profile, number % job.learners, job.learners), None, by, list_strikes(number)
        )
        for number in range(job.learners + extra.learners)
        for by in (plan if number >= job.learners else None,)
    ]


def _draw_learner(
    job: Job, dice: random.Random, slowness: float, own: float | None, plan: ChipPlan | None, regional: Sequence[object]
) -> Chips:
    return Chips(
        job.profile,
        slices=job.profile.slices // job.learners,
        chips=job.chips / job.learners,
        dice=random.Random(dice.getrandbits(64)),
        elastic=job.method != "data-parallel",
        slowness=slowness,
        own_slowness=own,
        plan=plan,
        regional=regional,  # type: ignore[arg-type]
    )


def _slowness(profile: Profile, number: int, learners: int) -> float:
    """Evenly from the fastest, 1, to the slowest, 1 + spread."""
    return 1.0 + profile.speed.spread * (number / (learners - 1) if learners > 1 else 0.0)


def _play(job: Job, learners: list[Chips], lives: list[list[TimeSpan]], span_s: float) -> PlayedRounds | None:
    if job.method in ALONE or job.rounds == 0:
        return None
    whole, synchronous = job.method == "synchronous-diloco", job.method in WAITING
    settings = settings_of(job.profile, len(learners), synchronous=synchronous, whole=whole)
    return ClusterWorld(job.profile, settings, learners, lives, job.seed).play(job.rounds, span_s)


def _live_on(chips: Chips, life: list[TimeSpan], until: float) -> None:
    now = life[-1].end
    while now < until:
        life.append(chips.next(now, until))
        now = life[-1].end


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Of several seeds: means, and the 95 % interval of each."""

    method: Method
    learners: int
    chips: int
    goodput: float
    goodput_interval: tuple[float, float] | None
    uptime: float
    uptime_interval: tuple[float, float] | None
    liveness: float
    participation: float | None
    participation_interval: tuple[float, float] | None
    effective_h: float | None
    merged_share: float | None
    """Fragment-tokens merged over those computed, of all learners together …"""
    merged_share_mean: float | None
    """… the mean of the learners' own …"""
    merged_share_slowest: float | None
    """… and that of the learner with the longest steps."""
    tokens_per_hour: float
    tokens_per_hour_interval: tuple[float, float] | None
    failures_per_hour: float
    lost: dict[str, float]
    seeds: int


def gather(job: Job, outcomes: Sequence[JobResult]) -> Cell:
    """What the seeds of one experiment come to."""
    tallies = [one.tally for one in outcomes]
    rounds = [one.rounds for one in outcomes if one.rounds is not None]
    goodput, uptime = [t.goodput for t in tallies], [t.uptime for t in tallies]
    tokens = [one.tokens_per_hour for one in outcomes]
    inside = [r.participation for r in rounds if r.participation is not None]
    steps = [r.effective_h for r in rounds if r.effective_h is not None]
    each = [r.shares[: job.learners] for r in rounds]  # from the fastest to the slowest, then those that are scavenged
    reasons = {reason for t in tallies for reason in t.lost}
    return Cell(
        method=job.method,
        learners=job.learners,
        chips=job.chips,
        goodput=fmean(goodput),
        goodput_interval=interval(goodput, most=1.0),
        uptime=fmean(uptime),
        uptime_interval=interval(uptime, most=1.0),
        liveness=fmean([t.liveness for t in tallies]),
        participation=fmean(inside) if inside else None,
        participation_interval=interval(inside, most=1.0),
        effective_h=fmean(steps) if steps else None,
        merged_share=_mean_known([r.merged_share for r in rounds]),
        merged_share_mean=_mean_known([_mean_known(shares) for shares in each]),
        merged_share_slowest=_mean_known([shares[-1] for shares in each if shares]),
        tokens_per_hour=fmean(tokens),
        tokens_per_hour_interval=interval(tokens),
        failures_per_hour=fmean([one.failures_per_hour for one in outcomes]),
        lost={reason: fmean([t.lost.get(reason, 0.0) for t in tallies]) for reason in sorted(reasons)},
        seeds=len(outcomes),
    )


def _mean_known(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def interval(values: Sequence[float], most: float = float("inf")) -> tuple[float, float] | None:
    """Mean ± t·s/√n; None with fewer than two."""
    if len(values) < 2:
        return None
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 1.96 + 2.4 / (len(values) - 1)
    half = t * stdev(values) / sqrt(len(values))
    return max(0.0, fmean(values) - half), min(most, fmean(values) + half)


# ---- a table of jobs, on all cores ----------------------------------------------------------------------------------

WAITING_STEPS = 5
"""Where learners wait, goodput itself comes from the rounds: so many times more steps are played."""


class JobOutcome(msgspec.Struct, frozen=True):
    index: int
    outcome: JobResult


class NumberedJob(msgspec.Struct, frozen=True):
    index: int
    job: Job


def experiments(
    profile: Profile,
    methods: Sequence[Method],
    learners: Sequence[int],
    chips: Sequence[int],
    *,
    hours: float,
    rounds: int,
) -> list[Job]:
    """One job per cell, with seed 0. A cluster that steps together is one learner, so it stands in the table where
    M = 1 does, and every other method where M is above that."""
    return [
        Job(profile, method, count, size, 0, hours, _rounds(profile, method, rounds))
        for method in methods
        for count in learners
        if (count == 1) == (method in ALONE) or (count == 1 and ALONE.isdisjoint(methods))
        for size in chips
    ]


def _rounds(profile: Profile, method: Method, rounds: int) -> int:
    if method not in WAITING:
        return rounds
    steps = WAITING_STEPS * rounds
    return max(10, steps // profile.rules.sync_every) if method == "synchronous-diloco" else steps


def cells(
    jobs: Sequence[Job], seeds: int, *, workers: int = 1, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Cell]:
    """In the order of the jobs, whatever finished first."""
    every = [msgspec.structs.replace(job, seed=seed) for job in jobs for seed in range(seeds)]
    found: dict[int, JobResult] = {}
    for answer in _answers(every, workers):
        found[answer.index] = answer.outcome
        progress(len(found), len(every))
    return [gather(job, [found[at * seeds + seed] for seed in range(seeds)]) for at, job in enumerate(jobs)]


def _answers(jobs: Sequence[Job], workers: int) -> Iterator[JobOutcome]:
    if workers <= 1 or len(jobs) == 1:
        yield from (JobOutcome(index, run(job)) for index, job in enumerate(jobs))
        return
    # The longest first, or one core would be left alone with them at the end.
    order = sorted(range(len(jobs)), key=lambda index: -jobs[index].learners * jobs[index].rounds)
    lines = [msgspec.json.encode(NumberedJob(index, jobs[index])).decode() for index in order]
    for line in worker_pool.run("atoll.estimate.goodput", lines, workers):
        yield msgspec.json.decode(line, type=JobOutcome)


def _serve(lines: Iterator[str]) -> Iterator[bytes]:
    for line in lines:
        question = msgspec.json.decode(line, type=NumberedJob)
        yield msgspec.json.encode(JobOutcome(question.index, run(question.job))) + b"\n"


if __name__ == "__main__":
    worker_pool.serve(_serve)
