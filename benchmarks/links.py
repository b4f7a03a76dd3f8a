"""Runs behind narrow links: overlap, H and merged share beside the floor, and ours against data-parallel.

    python benchmarks/links.py --row narrow-int4-16                     # a row of issue 41's table; --list names all
    python benchmarks/links.py --only ours --name mine --parameters 20e6 --step 0.2 --steps 480 --mbit 60 60 60 15
    python benchmarks/links.py                                          # ours against data-parallel, results/links.json
    python benchmarks/links.py --real                                   # loss of a real model with and without links
    python benchmarks/links.py --gpu --minutes 12                       # four learners of 574M on one GPU

Links are relays in user space (shaped_links.py): each learner has one of its own to the syncer, so wide in each
direction and with so much delay one way. Before a row a link of every rate is filled, and must carry what it was set to
within 5 %. Steps are pretended (flights.py: a sleep, one row of every tensor changed), everything else is real, with
the default settings: H = P = 24, contributions in bf16, versions in fp32.

A row tells, per run and per learner, overlap, realised H, merged share, members, how much of each direction was asked
for and used, joining, and the floor computed from the link as it was set (link_figures.py has the formula). Medians are
of the rounds behind the first three cycles and before the last one, or of all rounds with `--limit-from start`. The row
is refused if nothing was committed, or if fewer bytes crossed the links than the contributions in the rounds have.
Rows go to results/links-rows.json, one entry per name.

Data-parallel is a ring all-reduce of fp32 gradients (peer_learners/ring.py), each rank with such a link to the next; it
runs beside the whole backward pass, the best case. Its sum is held against gloo's. Without limits there is no relay.
Speeds of ours are counted without the first three cycles of H steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import link_figures as figures
import numpy as np
from link_figures import BodySizes, Floor, Outage, Segment
from peer_learners.ring import write_whole
from seeds import count_cores, find_commit
from shaped_links import Links, Rates, check_link, check_several, mean_bytes, peak_rate

from atoll.chaos.performance import read_events
from atoll.config import convert, merged, parse_settings
from atoll.launch.local import WORKLOAD, LocalRun
from atoll.observe.summary import summarise
from atoll.observe.timeline import select_kinds, select_paced_rounds
from atoll.store.rundir import RunDir
from atoll.telemetry.status import RunStatus

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
H = 24
FRAGMENTS = 24
WARM_UP = 3 * H
WAIT_S = 600.0
START_S = 300.0
"""Seconds that a syncer may take to start: on a fresh checkout it compiles its kernels first."""
LOOK_S = 0.25
"""Time between two samples of the links, and two looks at the schedule."""
LEAST_S = 10.0
"""Seconds that every learner trains at least before a run is ended by the clock."""
CROSSED = 0.9
"""Least share of its contributions' bytes that must have crossed a link."""
TOO_FAST = 1.05
CHECKS = 3
"""Tries of a link to carry its rate before a row."""

NARROW = "--only ours --parameters 20e6 --step 0.2 --steps 480 --delay 0.04 --limit-from joined"
INT4 = "--codec int4 --version-codec int4"
ROWS = {
    "narrow-int4-40": f"{NARROW} {INT4} --mbit 40",
    "narrow-int4-16": f"{NARROW} {INT4} --mbit 16",
    "narrow-defaults-60": f"{NARROW} --mbit 60",
    "narrow-defaults-60-quorum-4": f"{NARROW} --mbit 60 --quorum 4",
    "start-16": f"{NARROW} {INT4} --mbit 16 --limit-from start",
    "start-22": f"{NARROW} {INT4} --mbit 22 --limit-from start",
    "quarter": f"{NARROW} {INT4} --mbit 60 60 60 15 --adopt carry",
    "quarter-none": f"{NARROW} {INT4} --mbit 60 --adopt carry",
    "widening": f"{NARROW} --mbit 60 --steps 960 --then 320:600 --then 640:60",
    "cut-off": f"{NARROW} {INT4} --mbit 60 --steps 900 --adopt carry --cut 1:240:60",
    "real": "--real --steps 2400 --delay 0.04 --limit-from joined",
    "gpu": f"--gpu {INT4} --mbit 200 --delay 0.04 --limit-from joined",
}
"""Options of each named row; those of the command line come behind and win. quarter-none is quarter without the narrow
learner, for "the others unchanged". `--adopt carry --name NAME-carry` makes the carry row of any of them."""


# ---- options ---------------------------------------------------------------------------------------------------------


class RateChange(NamedTuple):
    step: int
    mbit: float


class PlannedCut(NamedTuple):
    learner: int
    from_step: int
    seconds: float


def parse_then(word: str) -> RateChange:
    """Read STEP:MBIT."""
    step, _, mbit = word.partition(":")
    try:
        change = RateChange(int(step), float(mbit))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is not STEP:MBIT, such as 240:600") from error
    if change.step < 0 or not change.mbit > 0:
        raise argparse.ArgumentTypeError(f"{word!r}: the step is at least 0, the rate above 0")
    return change


def parse_cut(word: str) -> PlannedCut:
    """Read LEARNER:FROM_STEP:SECONDS."""
    parts = word.split(":")
    try:
        learner, step, seconds = parts
        cut = PlannedCut(int(learner), int(step), float(seconds))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is not LEARNER:FROM_STEP:SECONDS, such as 1:240:60") from error
    if cut.learner < 0 or cut.from_step < 0 or not cut.seconds > 0:
        raise argparse.ArgumentTypeError(f"{word!r}: learner and step are at least 0, the seconds above 0")
    return cut


def spread_rates(both: Sequence[float], up: Sequence[float], down: Sequence[float], learners: int) -> list[Rates]:
    """Return each learner's rates from Mbit/s given once for all, or per learner. A direction's own ones go first."""
    ways = []
    for given, name in ((up or both, "up"), (down or both, "down")):
        if len(given) not in (1, learners):
            raise ValueError(f"{len(given)} rates {name} for {learners} learners: give one, or one for each of them")
        ways.append(list(given) * (learners if len(given) == 1 else 1))
    return [Rates.from_mbit(*pair) for pair in zip(*ways, strict=True)]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--row", choices=[*ROWS], help="a named row; other options are put on top of it")
    add("--list", action="store_true", help="print the named rows and end")
    add("--real", action="store_true", help="train the built-in GPT with and without links, compare the losses")
    add("--gpu", action="store_true", help="large GPTs on one GPU (a tiny one on a CPU), with and without links")
    add("--only", choices=["ours"], help="leave data-parallel and the run without limits out")
    add("--name", default="", help="of the row in --out; default: that of --row, or custom")
    add("--parameters", type=float, default=12e6)
    add("--step", type=float, default=0.4, help="seconds")
    add("--steps", type=int, default=7 * H)
    add("--learners", type=int, default=4)
    add("--mbit", type=float, nargs="+", default=[100.0], help="both ways, for all learners or for each")
    add("--mbit-up", type=float, nargs="+", default=[])
    add("--mbit-down", type=float, nargs="+", default=[])
    add("--delay", type=float, default=0.05, help="seconds, each way")
    add("--limit-from", choices=["start", "joined"], default="start", help="joined: once every learner trains")
    add("--then", type=parse_then, action="append", default=[], metavar="STEP:MBIT", help="other rates for all from it")
    add("--cut", type=parse_cut, action="append", default=[], metavar="LEARNER:FROM_STEP:SECONDS")
    add("--codec", default="bf16")
    add("--version-codec", default="fp32")
    add("--quorum", type=int, default=1)
    add("--adopt", default="overwrite")
    add("--sync-every", type=int, default=H)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the run")
    add("--load", type=float, default=1.1, help="--real: what is asked of the busier direction, as a share of it")
    add("--seeds", type=int, nargs="+", default=[0], help="--real")
    add("--minutes", type=float, default=12.0, help="--gpu: for both runs together, starting them included")
    add("--depth", type=int, default=0, help="--gpu: of the GPT; 0: 36 (574M) on a GPU, 2 on a CPU")
    add("--batch", type=int, default=0, help="--gpu: 0: 8 on a GPU, 2 on a CPU")
    add("--block", type=int, default=0, help="--gpu: 0: 1024 on a GPU, 64 on a CPU")
    add("--note", default="", help="a word on the machine, for the result")
    add("--events", type=Path, help="keep the run's events in this file")
    add("--out", type=Path, help="default: results/links.json, or links-rows.json where only ours is run")
    return parser


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(words)
    options.row = options.row or ("real" if options.real else "gpu" if options.gpu else None)
    if options.row:
        name = options.name or options.row
        options = parser.parse_args([*ROWS[options.row].split(), *words, "--name", name])
    options.name = options.name or "custom"
    alone = options.only or options.real or options.gpu
    options.out = options.out or RESULTS / ("links-rows.json" if alone else "links.json")
    try:
        options.rates = spread_rates(options.mbit, options.mbit_up, options.mbit_down, options.learners)
    except ValueError as error:
        parser.error(str(error))
    if any(cut.learner >= options.learners for cut in options.cut):
        parser.error(f"--cut names a learner that is not there: they are 0 to {options.learners - 1}")
    if not alone and options.steps < WARM_UP + 2 * H:
        parser.error(f"--steps is at least {WARM_UP + 2 * H}")
    return options


# ---- ours -----------------------------------------------------------------------------------------------------------


@dataclass
class LinkDriver:
    """What happens to the links while a run goes on: samples, the limit, the schedule of rates, cuts, the end."""

    links: Links | None
    learners: int
    then: Sequence[RateChange] = ()
    cuts: Sequence[PlannedCut] = ()
    end_at: float | None = None
    """Moment (wall clock) at which the run is ended, but not before every learner has trained for LEAST_S; None: it has
    a budget of its own."""
    run: LocalRun | None = None
    status: RunStatus | None = None
    all_train_at: float | None = None
    """Moment (wall clock) from which on every learner trains."""
    ended_at: float | None = None
    changes: list[tuple[float, int, float]] = field(default_factory=list)
    """Moment, the run's step, and Mbit/s of each change that was made."""
    outages: list[Outage] = field(default_factory=list)

    def watch(self, status: RunStatus | None) -> None:
        self.status = status or self.status

    async def drive(self) -> None:
        changes, cuts = sorted(self.then), list(self.cuts)
        async with asyncio.TaskGroup() as outages:
            while True:
                await asyncio.sleep(LOOK_S)
                if self.links is not None:
                    self.links.take_sample()
                if (status := self.status) is None:
                    continue
                self._note_training(status)
                while changes and status.global_step >= changes[0].step and self.all_train_at is not None:
                    self._change_rates(changes.pop(0), status.global_step)
                for cut in [cut for cut in cuts if status.global_step >= cut.from_step]:
                    cuts.remove(cut)
                    outages.create_task(self._cut(cut))
                self._end_in_time()

    def _note_training(self, status: RunStatus) -> None:
        training = sum(one.state == "training" for one in status.learners)
        if self.all_train_at is not None or training < self.learners:
            return
        self.all_train_at = time.time()
        if self.links is not None and not self.links.limited:
            self.links.limit()

    def _change_rates(self, change: RateChange, step: int) -> None:
        assert self.links is not None
        self.links.limit([Rates.from_mbit(change.mbit, change.mbit)] * self.learners)
        self.changes.append((time.time(), step, change.mbit))

    async def _cut(self, cut: PlannedCut) -> None:
        assert self.links is not None
        began = time.time()
        self.links.silence(cut.learner, True)
        await asyncio.sleep(cut.seconds)
        self.links.silence(cut.learner, False)
        self.outages.append(Outage(f"learner-{cut.learner}", began, time.time()))

    def _end_in_time(self) -> None:
        if self.end_at is None or self.all_train_at is None or self.ended_at is not None:
            return
        if time.time() >= max(self.end_at, self.all_train_at + LEAST_S) and self.run is not None:
            self.ended_at = time.time()
            self.run.request_end("its minutes are over")


@dataclass
class FinishedRun:
    """Events of a run, its summary, what its learners wrote, and what its links carried."""

    events: list[dict[str, Any]]
    summary: dict[str, Any]
    held: dict[str, dict[str, Any]]
    """Per learner: seconds that `learner.step()` took, and ends of steps by the monotonic clock."""
    driver: LinkDriver
    disk_s: float

    @property
    def step_ends(self) -> dict[str, list[float]]:
        """Ends of steps per learner, by the wall clock."""
        shift = time.time() - time.perf_counter()
        return {name: [at + shift for at in one["ends"]] for name, one in self.held.items()}


def make_document(options: argparse.Namespace, **protocol: Any) -> dict[str, Any]:
    document = {
        "protocol": {
            "learners": options.learners,
            "cut_every": 0,
            "wait_for_learners_s": 60.0,
            "codec": options.codec,
            "version_codec": options.version_codec,
            "quorum": options.quorum,
            "adopt": options.adopt,
            "sync_every": options.sync_every,
            **protocol,
        },
        "service": {"evaluate_every": 0},
    }
    return merged(document, parse_settings(options.set))


async def run_ours(
    document: dict[str, Any],
    driver: LinkDriver,
    scratch: Path,
    body_bytes: int,
    *,
    script: Sequence[str],
    evaluator: bool = False,
) -> FinishedRun:
    os.environ["HELD"] = str(scratch)
    folder = RunDir.create(scratch / "run")
    disk_s = figures.measure_disk_s(scratch, body_bytes)
    links = driver.links
    route = links.open_to_syncer if links is not None else None
    config = convert(document, "the benchmark")
    run = LocalRun(
        config,
        folder,
        script=list(script),
        evaluator=evaluator,
        route=route,
        watch=driver.watch,
        beside=driver.drive,
        start_s=START_S,
    )
    driver.run = run
    try:
        await run.run()
    finally:
        if links is not None:
            await links.close()
    events = read_events(folder)
    told = [json.loads(path.read_text()) for path in scratch.glob("held-*.json")]
    return FinishedRun(events, summarise(events), {one["learner"]: one for one in told}, driver, disk_s)


def run_pretended(options: argparse.Namespace, links: Links | None, bodies: BodySizes) -> FinishedRun:
    os.environ |= {"PARAMETERS": str(options.parameters), "STEP_S": str(options.step)}
    limited = links is not None
    driver = LinkDriver(links, options.learners, options.then if limited else (), options.cut if limited else ())
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        document = make_document(options, steps=options.steps)
        run = run_ours(document, driver, Path(scratch), bodies.down, script=[str(HERE / "flights.py")])
        return asyncio.run(run)


# ---- a row -----------------------------------------------------------------------------------------------------------


def describe_row(
    run: FinishedRun, rates: Sequence[Rates] | None, delay_s: float, bodies: BodySizes, *, whole: bool = False
) -> dict[str, Any]:
    """Return every figure of a run. `rates`: None without limits; `whole`: its first and last rounds count too."""
    rounds = select_paced_rounds(run.events)
    if not rounds:
        raise SystemExit("not one round was committed: there is nothing to tell")
    settings = run.summary["settings"]
    fragments, sync_every = int(settings["fragments"]), int(settings["sync_every"])
    settled = rounds if whole else figures.select_settled(rounds, 3 * fragments, fragments)
    contributions = figures.list_contributions(settled)
    ends = run.step_ends
    step_s = median(median(np.diff(one)) for one in ends.values() if len(one) > 1)
    row: dict[str, Any] = {
        **figures.describe_pace(contributions),
        "merged_share": run.summary["merged_share"],
        **figures.describe_rounds(settled),
        "participation": run.summary["participation"],
        "step_s": round(float(step_s), 4),
        "steps_per_s": round(sum(figures.steps_per_s(list(ends.values()), WARM_UP)), 3),
        "body_kilobytes": {"up": round(bodies.up / 1e3, 1), "down": round(bodies.down / 1e3, 1)},
        "held_median_s": round(median(spent for one in run.held.values() for spent in one["held"]), 5),
        "joining": figures.describe_joining(run.events),
        "per_learner": describe_learners(run, settled),
    }
    if rates is None or run.driver.links is None:
        return row
    disk_s = figures.measure_disk_of_events(settled)
    merge_s = figures.measure_merge_s(run.events)
    floors = {
        f"learner-{number}": figures.compute_floor(
            wide, delay_s, bodies, float(step_s), merge_s, run.disk_s if disk_s is None else disk_s
        )
        for number, wide in enumerate(rates)
    }
    loads = [figures.compute_load(wide, bodies, float(step_s), sync_every, fragments) for wide in rates]
    row["load"] = {way: max(one[way] or 0.0 for one in loads) for way in ("up", "down")}
    row["floors"] = {name: floor.to_dict() for name, floor in floors.items()}
    row |= describe_use(run, rates, bodies, settled)
    if run.driver.changes:
        row["segments"] = describe_segments(run, rates[0], delay_s, bodies, rounds, next(iter(floors.values())))
    if run.driver.outages:
        row["outages"] = [
            figures.describe_outage(one, rounds, ends[one.learner], fragments, sync_every) for one in run.driver.outages
        ]
    return row


def describe_learners(run: FinishedRun, settled: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    contributions = figures.list_contributions(settled)
    ends = run.step_ends
    return {
        name: {
            **figures.describe_pace([one for one in contributions if one.learner == name]),
            "merged_share": told["merged_share"],
            "participation": told["participation"],
            "share_of_rounds": told["share"],
            "steps": told["steps"],
            "steps_per_s": figures.steps_per_s([ends[name]], WARM_UP)[0] if name in ends else None,
        }
        for name, told in run.summary["per_learner"].items()
    }


def describe_use(
    run: FinishedRun, rates: Sequence[Rates], bodies: BodySizes, settled: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Tell what the links carried, and refuse a run whose bodies did not cross them."""
    links = run.driver.links
    assert links is not None
    if not links.limited:
        raise SystemExit("the links were never limited: not all learners trained at one time")
    rounds = select_kinds(run.events, "round")
    given = {f"learner-{number}": 0 for number in range(len(rates))}
    for event in rounds:
        for member in event["members"]:
            given[member["learner"]] += 1
    last = links.samples[-1]
    for number, (name, count) in enumerate(given.items()):
        # The drain's bodies cross after the last sample.
        if last.up[number] < CROSSED * (count - FRAGMENTS) * bodies.up:
            raise SystemExit(f"{count} contributions of {name}, but only {last.up[number]} bytes crossed its link")
    begin, end = settled[0]["at"], settled[-1]["at"]
    seconds = max(end - begin, 1e-9)
    used = {}
    for way in ("up", "down"):
        rate = mean(getattr(wide, way) for wide in rates)
        peak = max(peak_rate(limited_samples(run), way, number) for number in range(len(rates)))
        widest = max([max(getattr(wide, way) for wide in rates), *(c[2] * 1e6 / 8 for c in run.driver.changes)])
        if peak > TOO_FAST * widest:
            raise SystemExit(f"a link carried {peak:.0f} bytes/s {way}, set were {widest:.0f}")
        used[way] = {
            "share_of_rate": round(mean_bytes(links.samples, way, begin, end) / seconds / rate, 4),
            "peak_share": round(peak / widest, 4),
            "kilobytes_per_round": round(
                mean_bytes(links.samples, way, begin, end) / max(len(settled) - 1, 1) / 1e3, 1
            ),
        }
    return {"used": used, "megabytes": {"up": round(sum(last.up) / 1e6, 1), "down": round(sum(last.down) / 1e6, 1)}}


def limited_samples(run: FinishedRun) -> list[Any]:
    """Return the samples since the links were limited: before, there is no rate to hold them against."""
    assert run.driver.links is not None
    since = run.driver.links.limited_at
    return [sample for sample in run.driver.links.samples if sample.at >= since]


def describe_segments(
    run: FinishedRun,
    first: Rates,
    delay_s: float,
    bodies: BodySizes,
    rounds: Sequence[dict[str, Any]],
    floor: Floor,
) -> list[dict[str, Any]]:
    assert first.up is not None
    began = run.driver.all_train_at or rounds[0]["at"]
    marks = [(began, 0, first.up * 8e-6), *run.driver.changes]
    ends = [at for at, _, _ in run.driver.changes] + [rounds[-1]["at"] + 1.0]
    found = []
    for (at, step, mbit), until in zip(marks, ends, strict=True):
        rates = Rates.from_mbit(mbit, mbit)
        here = figures.compute_floor(rates, delay_s, bodies, floor.step_s, floor.merge_s, floor.disk_s)
        found.append(figures.describe_segment(Segment(mbit, at, until, step), rounds, here))
    return found


def check_links(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fill a link of every rate that the row uses, or end here if it carries something else."""
    rates = {wide for pair in options.rates for wide in (pair.up, pair.down)}
    rates |= {change.mbit * 1e6 / 8 for change in options.then}
    found = []
    for rate in sorted(rates):
        # A machine that is busy for a moment is asked again; one that stays busy measures nothing.
        for _ in range(CHECKS):
            check = asyncio.run(check_link(rate, options.delay))
            say(check.describe())
            if check.holds:
                break
        else:
            raise SystemExit("that is not within 5 % of the rate it was set to")
        found.append(check.to_dict())
    return found


def make_row(options: argparse.Namespace) -> dict[str, Any]:
    bodies = BodySizes.of_fragment(int(options.parameters) // FRAGMENTS, options.codec, options.version_codec)
    checked = check_links(options)
    links = Links(options.rates, options.delay, limited=options.limit_from == "start")
    run = run_pretended(options, links, bodies)
    keep_events(options, run)
    whole = options.limit_from == "start"
    row = describe_row(run, options.rates, options.delay, bodies, whole=whole)
    return {"asked": list_asked(options), **row, "link_checks": checked}


# ---- a real model ----------------------------------------------------------------------------------------------------

REAL = {"depth": 3, "pace_s": 0.15}
"""Workload of --real: 357k parameters; 0.15 s is more than a step takes where four learners share two cores."""


def compare_losses(options: argparse.Namespace) -> dict[str, Any]:
    """Train the built-in GPT without and with links, for each seed the same number of steps."""
    found: dict[str, Any] = {"without": {}, "with": {}}
    rates, bodies = options.rates, BodySizes(1, 1)
    for seed in options.seeds:
        for name in ("without", "with"):
            document = make_document(options, steps=options.steps)
            document |= {"seed": seed, "workload": {**REAL, **document.get("workload", {})}}
            document["service"]["evaluate_every"] = 1000
            links = Links(rates, options.delay, limited=False) if name == "with" else None
            driver = LinkDriver(links, options.learners)
            with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
                words = (document, driver, Path(scratch), bodies.down)
                run = asyncio.run(run_ours(*words, script=WORKLOAD, evaluator=True))
            if links is not None:
                keep_events(options, run)
            row = describe_real(run, rates if links else None, options.delay, bodies)
            found[name][str(seed)] = row
            say(f"seed {seed} {name:7} loss {row['loss']:.4f}, overlap {row['overlap']['median']}")
            if links is None:
                bodies = sizes_of_plan(run, options)
                rates = choose_rates(options, bodies, row["step_s"], int(run.summary["settings"]["fragments"]))
                mbit = (rates[0].up or 0.0) * 8e-6
                say(f"links of {mbit:.2f} Mbit/s: {options.load:.0%} is asked of them")
    losses = {name: mean(row["loss"] for row in rows.values()) for name, rows in found.items()}
    found["loss"] = {**losses, "above_percent": round(100 * (losses["with"] / losses["without"] - 1), 3)}
    return found


def sizes_of_plan(run: FinishedRun, options: argparse.Namespace) -> BodySizes:
    elements = run.summary["parameters"] // int(run.summary["settings"]["fragments"])
    return BodySizes.of_fragment(elements, options.codec, options.version_codec)


def choose_rates(options: argparse.Namespace, bodies: BodySizes, step_s: float, fragments: int) -> list[Rates]:
    """Return rates at which the busier direction is asked for `--load` of what it carries."""
    round_s = step_s * options.sync_every / fragments
    rate = max(bodies) / round_s / options.load
    return [Rates(rate, rate)] * options.learners


def describe_real(run: FinishedRun, rates: Sequence[Rates] | None, delay_s: float, bodies: BodySizes) -> dict[str, Any]:
    """Tell a run whose learners write no times: their step is that of the run."""
    rounds = select_paced_rounds(run.events)
    if not rounds:
        raise SystemExit("not one round was committed: there is nothing to tell")
    sync_every, fragments = (int(run.summary["settings"][key]) for key in ("sync_every", "fragments"))
    settled = figures.select_settled(rounds, 3 * fragments, fragments)
    first, last = settled[0], settled[-1]
    steps = [
        (later["t"] - earlier["t"]) / (last["at"] - first["at"])
        for later in last["members"]
        for earlier in first["members"]
        if earlier["learner"] == later["learner"]
    ]
    step_s = 1 / median(steps)
    row = {
        **figures.describe_pace(figures.list_contributions(settled)),
        "loss": run.summary["validation_loss_end"],
        "merged_share": run.summary["merged_share"],
        **figures.describe_rounds(settled),
        "step_s": round(step_s, 4),
        "tokens": run.summary["tokens"]["computed"],
    }
    if rates is not None:
        floor = figures.compute_floor(
            rates[0], delay_s, bodies, step_s, figures.measure_merge_s(run.events), run.disk_s
        )
        row["floors"] = {"all": floor.to_dict()}
        row["load"] = figures.compute_load(rates[0], bodies, step_s, sync_every, fragments)
        row |= describe_use(run, rates, bodies, settled)
    return row


# ---- four learners on one GPU ----------------------------------------------------------------------------------------

END_S = 40.0
"""Seconds of each run's minutes that its end may take: a cycle of rounds that nothing paces, over the same links."""


def compare_on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Run large GPTs without links and with them, half of the minutes each; tokens/s are compared."""
    import torch

    gpu = torch.cuda.is_available()
    depth, batch = options.depth or (36 if gpu else 2), options.batch or (8 if gpu else 2)
    block = options.block or (1024 if gpu else 64)
    os.environ |= {"DEPTH": str(depth), "BATCH": str(batch), "BLOCK": str(block)}
    # Twice as many as there are, one way: bodies go both ways.
    carried = asyncio.run(check_several(options.rates[0].up, options.delay, 2 * options.learners))
    say(f"{2 * options.learners} links at once carry {', '.join(f'{one:.1f}' for one in carried)} Mbit/s")
    if gpu and any(abs(one * 1e6 / 8 / options.rates[0].up - 1) > 0.05 for one in carried):
        raise SystemExit("that is not within 5 % of the rate they were set to")
    found: dict[str, Any] = {"depth": depth, "batch": batch, "block": block, "links_at_once_mbit": carried}
    bodies = BodySizes(1, 1)
    started = time.monotonic()
    for left, name in ((2, "without"), (1, "with")):
        share_s = (60 * options.minutes - (time.monotonic() - started)) / left
        end_at = time.time() + share_s - END_S
        links = Links(options.rates, options.delay, limited=False) if name == "with" else None
        driver = LinkDriver(links, options.learners, end_at=end_at)
        with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
            words = (make_document(options), driver, Path(scratch), bodies.down)
            run = asyncio.run(run_ours(*words, script=[str(HERE / "real_learner.py")]))
        keep_events(options, run)
        bodies = sizes_of_plan(run, options)
        row = describe_row(run, options.rates if links else None, options.delay, bodies)
        row["parameters"] = run.summary["parameters"]
        row["tokens_per_s"] = round(count_tokens_per_s(run, batch * block), 1)
        found[name] = row
        print(figures.format_row(f"{options.name} {name}", row), flush=True)
    found["tokens_ratio"] = round(found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"], 4)
    return found


def count_tokens_per_s(run: FinishedRun, tokens_per_step: int) -> float:
    """Count the steps of all learners between a fifth of the time in which all of them train and its end."""
    assert run.driver.all_train_at is not None
    assert run.driver.ended_at is not None
    begin = run.driver.all_train_at + 0.2 * (run.driver.ended_at - run.driver.all_train_at)
    steps = sum(begin <= at < run.driver.ended_at for ends in run.step_ends.values() for at in ends)
    return steps * tokens_per_step / (run.driver.ended_at - begin)


# ---- data-parallel --------------------------------------------------------------------------------------------------


def start_ranks(options: argparse.Namespace, scratch: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    ring = [sys.executable, str(HERE / "peer_learners" / "ring.py")]
    words = [str(options.learners), str(int(options.parameters)), str(steps), str(options.step), str(scratch)]
    return [subprocess.Popen([*ring, str(rank), *words]) for rank in range(options.learners)]


async def run_ring(options: argparse.Namespace, links: Links | None, scratch: Path, steps: int) -> dict[str, Any]:
    ranks = start_ranks(options, scratch, steps)
    try:
        for rank in range(options.learners):
            port = int(await wait_for(scratch / f"port-{(rank + 1) % options.learners}", ranks))
            line = await links.open("127.0.0.1", port) if links is not None else None
            write_whole(scratch / f"next-{rank}", str(line.port if line is not None else port))
        found = [json.loads(await wait_for(scratch / f"rank-{rank}.json", ranks)) for rank in range(options.learners)]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        if links is not None:
            await links.close()
    step_s = median(spent for one in found for spent in one["times"])
    return {"step_s": round(step_s, 3), "steps_per_s": round(options.learners / step_s, 3), "sum": found[0]["sum"]}


async def wait_for(path: Path, ranks: list[subprocess.Popen[bytes]]) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline or any(one.poll() for one in ranks):
            raise SystemExit("a rank of the ring failed")
        await asyncio.sleep(0.05)
    return path.read_text()


def sum_by_gloo(elements: int, learners: int) -> list[float]:
    """The same gradients, summed by gloo without any link."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(learners), str(elements), str(port)]
    script = [sys.executable, str(HERE / "peer_learners" / "gloo_sum.py")]
    ranks = [subprocess.Popen([*script, str(rank), *words], stdout=subprocess.PIPE) for rank in range(learners)]
    said = [one.communicate(timeout=WAIT_S)[0] for one in ranks]
    values: list[float] = json.loads(said[0])
    return values


# ---- ours against data-parallel --------------------------------------------------------------------------------------


def describe_ours(run: FinishedRun, bodies: BodySizes, options: argparse.Namespace, *, limited: bool) -> dict[str, Any]:
    rounds = select_kinds(run.events, "round")
    kept = figures.select_settled(rounds, WARM_UP, H)
    since = [member["since"] for event in kept for member in event["members"] if member["since"] is not None]
    if not since:
        raise SystemExit(
            f"no fragment was synced twice in {len(kept)} of {len(rounds)} rounds: there is nothing to tell"
        )
    held = sorted(spent for one in run.held.values() for spent in one["held"][WARM_UP:])
    told = {
        "steps_per_s": round(sum(figures.steps_per_s([one["ends"] for one in run.held.values()], WARM_UP)), 3),
        "effective_h": {"median": median(since), "mean": round(mean(since), 2)},
        "round_s": round(median(event["sync_s"] for event in kept), 3),
        "held_median_s": round(median(held), 5),
        "held_p99_s": round(held[int(0.99 * len(held))], 5),
        "participation": run.summary["participation"],
        "merged_share": run.summary["merged_share"],
        "rounds": len(rounds),
    }
    if limited:
        used = describe_use(run, options.rates, bodies, kept)["used"]
        told["kilobytes_per_round"] = {way: one["kilobytes_per_round"] for way, one in used.items()}
    return told


def compare_methods(options: argparse.Namespace) -> dict[str, Any]:
    def fresh(limited: bool) -> Links | None:
        return Links(options.rates, options.delay) if limited else None

    bodies = BodySizes.of_fragment(int(options.parameters) // FRAGMENTS, options.codec, options.version_codec)
    found: dict[str, Any] = {}
    for limited, name in ((False, "unlimited"), (True, "limited")):
        run = run_pretended(options, fresh(limited), bodies)
        ours = describe_ours(run, bodies, options, limited=limited)
        with tempfile.TemporaryDirectory() as scratch:
            steps = 4 if limited else 20
            ring = asyncio.run(run_ring(options, fresh(limited), Path(scratch), steps))
        found[name] = {"ours": ours, "data_parallel": ring, "load": round(os.getloadavg()[0], 1)}
        say(f"{name} { {**found[name], 'data_parallel': {**ring, 'sum': '…'}} }")
    theirs = np.array(sum_by_gloo(int(options.parameters), options.learners))
    sums = [np.array(found[name]["data_parallel"].pop("sum")) for name in ("unlimited", "limited")]
    if not all(np.allclose(one, theirs, rtol=1e-5, atol=1e-5) for one in sums):
        raise SystemExit("the ring's sum is not gloo's")
    found["compared"] = {
        method: round(found["limited"][method]["steps_per_s"] / found["unlimited"][method]["steps_per_s"], 4)
        for method in ("ours", "data_parallel")
    }
    return found


# ---- results ---------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def keep_events(options: argparse.Namespace, run: FinishedRun) -> None:
    if options.events:
        with options.events.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in run.events)


def list_asked(options: argparse.Namespace) -> dict[str, Any]:
    names = ("parameters", "step", "steps", "learners", "mbit", "mbit_up", "mbit_down", "delay", "limit_from", "codec",
             "version_codec", "quorum", "adopt", "sync_every", "set", "then", "cut")  # fmt: skip
    return {name: value for name in names if (value := getattr(options, name)) not in ([], None)}


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in ("torch", "numpy")}},
        "commit": find_commit(),
        "note": options.note,
    }


def find_version(package: str) -> str:
    """An unpacked wheel on PYTHONPATH may have lost its metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write_row(path: Path, name: str, row: dict[str, Any]) -> None:
    """Add the row to the file, in the place of an earlier one of that name."""
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows[name] = row
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    options = parse_options(sys.argv[1:])
    if options.list:
        print("\n".join(f"{name}: {words}" for name, words in ROWS.items()))
        return 0
    about = {**describe_machine(options), "machine_load": [round(os.getloadavg()[0], 1)]}
    if not (options.only or options.real or options.gpu):
        result = {**about, "asked": list_asked(options), **compare_methods(options)}
        print(json.dumps(result, indent=1))
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    print(figures.format_header(), flush=True)
    if options.real:
        row = {"asked": list_asked(options), **compare_losses(options)}
        for name in ("without", "with"):
            for seed, one in row[name].items():
                print(figures.format_row(f"{options.name} {name}, seed {seed}", one))
        print(f"loss with links {row['loss']['above_percent']:+.2f} % against the same runs without")
    elif options.gpu:
        row = {"asked": list_asked(options), **compare_on_gpu(options)}
        print(f"tokens/s with links {row['tokens_ratio']:.4f} of those without")
    else:
        row = make_row(options)
        print(figures.format_row(options.name, row))
        print_more(row)
    about["machine_load"] = [*about["machine_load"], round(os.getloadavg()[0], 1)]
    write_row(options.out, options.name, {**about, **row})
    return 0


def print_more(row: dict[str, Any]) -> None:
    for name, one in row["per_learner"].items():
        joined = row["joining"].get(name, {})
        say(f"{name}: overlap {one['overlap']}, H {one['h']}, merged {one['merged_share']}, trains after {joined}")
    for segment in row.get("segments", ()):
        say(f"{segment['mbit']:g} Mbit/s from step {segment['from_step']}: overlap {segment['overlap']}, "
            f"H {segment['h']}, floor {segment['floor']}, settled after {segment['settled_after']}")  # fmt: skip
    for outage in row.get("outages", ()):
        say(f"{outage}")


if __name__ == "__main__":
    raise SystemExit(main())
