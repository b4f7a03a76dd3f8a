"""Rows at 20 tokens per parameter: decoupled training against data-parallel at the lengths people train.

    python benchmarks/corpus.py unpack --pieces 2                        # the text of the 10M rows
    python benchmarks/long_rows.py --list                                # the plan, what is missing, how long it takes
    setsid python benchmarks/long_rows.py --run --mixed --side-by-side 3 --minutes 25 > log 2>&1 &     # on a GPU
    python benchmarks/long_rows.py --status                              # done, running, cut off, failed, missing
    python benchmarks/long_rows.py --join DIR/table.json                 # take the rows of another machine
    python benchmarks/long_rows.py --run --tiny --work /tmp/tiny         # on a CPU: every row at a tiny shape

Learners in lockstep by lockstep_engine.py, text by corpus.py: held-out text is of other packages than training text.
- The steps of a row follow from its parameters, 20 tokens for each, and its own batch. A row says how often it went
  through the text; windows are drawn with replacement.
- Data-parallel is trained with several peak learning rates at 10M, seed 0. The best one is that of every row of its
  group; until all have been trained, the rows that need it wait.
- `--run` trains each row in a process of its own, in the order of the plan, and writes a heartbeat every few seconds. A
  row that ends is added to the table; a row whose heartbeat stops is cut off, is never reported and is trained again.
- A difference is taken seed by seed; one below its spread is "none".
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import corpus
import msgspec
import numpy as np
import torch
from lockstep_engine import Row, compare, prepare_torch, train
from quality import Table, device_name, find_commit, is_row, join_tables

from atoll.telemetry.events import versions
from atoll.workloads.gpt import Gpt, GptConfig
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text

RESULTS = Path("benchmarks/results/long-rows.json")
WORK = Path("build/long-rows")
TOKENS_PER_PARAMETER = 20.0
RATES = (1e-3, 2e-3, 4e-3)
"""Peak learning rates that are tried."""
DEPTHS = {"10M": 10, "35M": 14}
"""12.4M and 33.9M parameters."""
BLOCK, BATCH = 256, 16
"""Windows of 256 bytes, 16 of them for a learner and step."""
EVAL_WINDOWS = 1024
BEAT_S = 5.0
STALE_S = 60.0
"""A heartbeat older than this is that of a row that was cut off."""
FLOPS = 5e13
"""Rate at which one of three rows on an H200 trained in the rows of carry-long.json; a row of unknown length counts on
it."""


class Shape(NamedTuple):
    """Sizes of a table; `--tiny` has others."""

    depths: Mapping[str, int] = DEPTHS
    block: int = BLOCK
    batch: int = BATCH
    tokens_per_parameter: float = TOKENS_PER_PARAMETER
    eval_windows: int = EVAL_WINDOWS


TINY = Shape({"10M": 1, "35M": 2}, block=32, batch=2, tokens_per_parameter=0.5, eval_windows=16)


class Group(NamedTuple):
    """Rows of one size, number of learners and H."""

    name: str
    size: str
    learners: int
    seeds: tuple[int, ...] = (0,)
    sync_every: int = 24
    rate_of: str = ""
    """Group whose search gives the learning rate; empty: its own."""
    against: str = ""
    """Group whose data-parallel row is compared with; empty: its own."""
    windows: int = 1
    """Number of times a learner's batch is the usual one."""


GROUPS = (
    Group("10m-m4", "10M", 4, seeds=(0, 1, 2)),
    Group("10m-m8", "10M", 8, seeds=(0, 1, 2)),
    Group("35m-m4", "35M", 4, rate_of="10m-m4"),
    Group("35m-m8", "35M", 8, rate_of="10m-m8"),
    Group("10m-m16", "10M", 16, rate_of="10m-m8"),
    # One learner with the batch of four: its data-parallel row is that of M = 4.
    Group("10m-m1", "10M", 1, rate_of="10m-m4", against="10m-m4", windows=4),
    Group("10m-h96", "10M", 4, seeds=(0, 1, 2), sync_every=96, rate_of="10m-m4", against="10m-m4"),
)
"""Groups in the order in which they are trained."""


class LongRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table with its size and text."""

    train: Row
    depth: int
    block: int
    batch: int
    steps: int
    pieces: int
    """Number of pieces of the text."""

    @property
    def against(self) -> str:
        return self.train.against

    @property
    def cost(self) -> tuple[Any, ...]:
        return (*self.train.cost, self.depth, self.steps)

    @property
    def tokens(self) -> int:
        return self.steps * self.train.learners * self.batch * self.block

    @property
    def flops(self) -> float:
        return 6.0 * count_parameters(self.depth) * self.tokens


class Task(NamedTuple):
    """A row and seed to train."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}/{self.seed}"


@cache
def count_parameters(depth: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(GptConfig(depth=depth)).parameters())


# ---- the plan -------------------------------------------------------------------------------------------------------


class Plan:
    """Rows and the order in which they are trained, as far as the searched learning rates are known."""

    def __init__(self, shape: Shape, index: corpus.Index, content: Mapping[str, Any]) -> None:
        """`content`: that of the results file."""
        self._shape, self._index = shape, index
        self.rows: dict[str, LongRow] = {}
        for group in GROUPS:
            for rate in () if group.rate_of else RATES:
                self.rows[dp_name(group.name, rate)] = self._make_row(group, method="data-parallel", lr=rate)
        self.rates = {group.name: self._find_rate(group, content) for group in GROUPS if not group.rate_of}
        """Best learning rate of each search; None: not known yet."""
        self.waiting: list[str] = []
        """Rows that need a learning rate which is not known."""
        for group in GROUPS:
            best = self.rates[group.rate_of or group.name]
            if best is None:
                self.waiting += [f"{group.name}-{kind}" for kind in ("default", "carry")]
                continue
            if not group.against:
                name = dp_name(group.name, best)
                self.rows[name] = self._make_row(group, method="data-parallel", lr=best, against=name)
            against = dp_name(group.against or group.name, best)
            for kind, adopt in (("default", "overwrite"), ("carry", "carry")):
                row = self._make_row(group, adopt=adopt, sync_every=group.sync_every, lr=best, against=against)
                self.rows[f"{group.name}-{kind}"] = row

    def _make_row(self, group: Group, **changes: Any) -> LongRow:
        depth, batch = self._shape.depths[group.size], self._shape.batch * group.windows
        wanted = self._shape.tokens_per_parameter * count_parameters(depth)
        steps = max(1, round(wanted / (group.learners * batch * self._shape.block)))
        row = Row(learners=group.learners, **({"against": dp_name(group.name, changes["lr"])} | changes))
        pieces = self._index.pieces_for(round(wanted))
        return LongRow(train=row, depth=depth, block=self._shape.block, batch=batch, steps=steps, pieces=pieces)

    def _find_rate(self, group: Group, content: Mapping[str, Any]) -> float | None:
        losses = {}
        for rate in RATES:
            name = dp_name(group.name, rate)
            run = content.get("results", {}).get(name, {}).get("0")
            if run is None or not is_row(content["rows"].get(name), self.rows[name]):
                return None
            losses[rate] = run["loss"]
        return min(losses, key=lambda rate: losses[rate])

    def tasks(self) -> Iterator[Task]:
        """Yield what is to be trained, in order: searches first, then seed by seed, so that seeds are paired."""
        for group in GROUPS:
            if not group.rate_of:
                yield from (Task(dp_name(group.name, rate), 0) for rate in RATES)
            rate = self.rates[group.rate_of or group.name]
            if rate is None:
                continue
            names = [] if group.against else [dp_name(group.name, rate)]
            names += [f"{group.name}-default", f"{group.name}-carry"]
            for seed in group.seeds:
                # Each task once: seed 0 of the best rate is part of the search.
                yield from (Task(name, seed) for name in names if group.rate_of or seed or name != names[0])


def dp_name(group: str, rate: float) -> str:
    return f"{group}-dp-{rate:g}"


def read_content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def open_table(path: Path, plan: Plan, options: dict[str, Any]) -> Table:
    return Table(path, options, plan.rows)


def describe_table(shape: Shape, index: corpus.Index, mixed: bool) -> dict[str, Any]:
    """Return what the rows of a table have in common."""
    settings = make_settings(shape, 1, 1)
    inner = {key: getattr(settings, key) for key in ("warmup", "floor", "weight_decay", "clip", "eval_windows")}
    about = {"tokens_per_parameter": shape.tokens_per_parameter, "mixed": mixed, "manifest": index.manifest}
    return about | inner | {"betas": list(settings.betas)}


def make_settings(shape: Shape, depth: int, batch: int) -> WorkloadSettings:
    return WorkloadSettings(depth=depth, block=shape.block, batch=batch, eval_windows=shape.eval_windows)


def expect_s(row: LongRow, table: Table) -> float:
    """Return how long a row takes: as long as rows of the same cost did, or by its arithmetic."""
    runs = [(table.rows[name], run) for name, seeds in table.results.items() for run in seeds.values()]
    same = [run["seconds"] for other, run in runs if other.cost == row.cost]
    if same:
        return float(median(same))
    rates = [other.flops / run["seconds"] for other, run in runs if isinstance(other, LongRow)]
    return row.flops / (median(rates) if rates else FLOPS)


# ---- a row ----------------------------------------------------------------------------------------------------------


class PackedText(Text):
    """Training and held-out text of different packages."""

    def __init__(self, build: Path, index: corpus.Index, pieces: int) -> None:
        path = build / corpus.train_name(pieces)
        if not path.exists():
            raise SystemExit(f"{path} is not there: python benchmarks/corpus.py unpack --pieces {pieces}")
        self.name, self.digest = f"{pieces} pieces of {index.manifest[:12]}", index.digest(pieces)
        # Mapped, so that rows side by side share one copy in memory.
        self.train = np.asarray(np.memmap(path, np.uint8, "r"))
        self.held_out = np.asarray(np.memmap(build / "held-out.txt", np.uint8, "r"))


def train_task(order: dict[str, Any], shape: Shape, index: corpus.Index, build: Path, beat: Path) -> dict[str, Any]:
    """Train one row and seed; `beat` gets its progress."""
    row = msgspec.convert(order["row"], LongRow)
    text, last = PackedText(build, index, row.pieces), 0.0
    prepare_torch()

    def report(step: int) -> None:
        nonlocal last
        if time.monotonic() > last + BEAT_S:
            last = time.monotonic()
            write_json(beat, {"step": step, "steps": row.steps, "at": time.time()})

    settings = make_settings(shape, row.depth, row.batch)
    run = train(row.train, order["seed"], settings, row.steps, text, mixed=order["mixed"], report=report)
    own = row.tokens / row.train.learners
    return {
        **run,
        **{f"{way}_bytes_per_token": run[f"{way}_bytes"] / own for way in ("up", "down")},
        "seed": order["seed"],
        "steps": row.steps,
        "tokens": row.tokens,
        "tokens_per_parameter": row.tokens / run["parameters"],
        "epochs": row.tokens / len(text.train),
        "text": text.digest,
        "text_bytes": len(text.train),
        "command": order["command"],
        "commit": order["commit"],
        "device": device_name(),
        "versions": versions(),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a file that another process reads: it sees the old one or all of the new one."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.replace(path)


# ---- many rows ------------------------------------------------------------------------------------------------------


class Worker(NamedTuple):
    """Process that trains one row."""

    task: Task
    process: subprocess.Popen[bytes]
    folder: Path
    began: float


class Runner:
    """Start the rows of a plan side by side and add those that end to the table."""

    def __init__(self, options: argparse.Namespace, index: corpus.Index) -> None:
        self._options, self._index, self._shape = options, index, shape_of(options)
        self._about = describe_table(self._shape, index, options.mixed)
        self._path, self._beats = options.work / "table.json", options.work / "beats.json"
        options.work.mkdir(parents=True, exist_ok=True)
        self._deadline = time.monotonic() + 60 * options.minutes
        self._workers: list[Worker] = []
        self._ended: dict[str, str] = {}
        """State of rows that ended without a result."""
        self._open(options.out)
        self._open(self._path)

    def _open(self, path: Path) -> None:
        """Read the rows of a file into the table of this run."""
        plan = Plan(self._shape, self._index, read_content(path))
        if path != self._path and path.exists():
            open_table(self._path, plan, self._about).take_rows(path)
        self._plan = Plan(self._shape, self._index, read_content(self._path))
        self._table = open_table(self._path, self._plan, self._about)

    def run(self) -> None:
        while True:
            self._reap()
            if time.monotonic() > self._deadline:
                self._stop("cut off by --minutes")
            while len(self._workers) < self._options.side_by_side and (task := self._choose()) is not None:
                self._workers.append(self._start(task))
            self._write_beats()
            if not self._workers:
                break
            time.sleep(self._options.poll)

    def stop(self) -> None:
        """Stop every worker, after a signal."""
        self._stop("cut off by a signal")
        self._write_beats()

    def _choose(self) -> Task | None:
        """Return the next row that is missing and would end in time."""
        started = {str(worker.task) for worker in self._workers} | self._ended.keys()
        left = self._deadline - time.monotonic()
        for task in select_tasks(self._plan, self._options):
            if self._table.has_run(*task) or str(task) in started:
                continue
            if expect_s(self._plan.rows[task.name], self._table) <= left:
                return task
        return None

    def _start(self, task: Task) -> Worker:
        folder = self._options.work / f"{task.name}-{task.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for stale in ("beat.json", "run.json"):  # of a row that was cut off
            (folder / stale).unlink(missing_ok=True)
        mixed = self._options.mixed
        command = (
            f"python benchmarks/long_rows.py --run {'--mixed ' if mixed else ''}--rows {task.name} --seeds {task.seed}"
        )
        row = msgspec.json.decode(msgspec.json.encode(self._plan.rows[task.name]))
        order = {"row": row, "seed": task.seed, "mixed": mixed, "command": command}
        write_json(folder / "order.json", order | {"commit": self._options.commit or find_commit()})
        arguments = ["--train", str(folder), *(["--tiny"] if self._options.tiny else [])]
        places = [f"--manifests={self._options.manifests}", f"--text={self._options.text}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, __file__, *arguments, *places], stdout=log, stderr=log)
        print(f"{task}: started", flush=True)
        return Worker(task, process, folder, time.time())

    def _reap(self) -> None:
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)
            run = read_content(worker.folder / "run.json")
            if worker.process.returncode or not run:
                lines = (worker.folder / "log").read_text(errors="replace").strip().splitlines()
                self._ended[str(worker.task)] = f"failed: {lines[-1] if lines else worker.process.returncode}"
                print(f"{worker.task}: {self._ended[str(worker.task)]}", flush=True)
                continue
            self._table.add_run(*worker.task, run)
            print(f"{worker.task}: loss {run['loss']:.4f}, {run['seconds']} s", flush=True)
            self._open(self._path)  # the search may have ended with this row

    def _stop(self, reason: str) -> None:
        for worker in self._workers:
            worker.process.terminate()
            worker.process.wait()
            self._ended[str(worker.task)] = reason
            print(f"{worker.task}: {reason}", flush=True)
        self._workers.clear()

    def _write_beats(self) -> None:
        rows: dict[str, dict[str, Any]] = {task: {"state": state} for task, state in self._ended.items()}
        for worker in self._workers:
            beat = read_content(worker.folder / "beat.json") or {"step": 0, "at": worker.began}
            rows[str(worker.task)] = {"state": "running", "began": worker.began, **beat}
        write_json(self._beats, {"at": time.time(), "rows": rows})


def shape_of(options: argparse.Namespace) -> Shape:
    return TINY if options.tiny else Shape()


def select_tasks(plan: Plan, options: argparse.Namespace) -> Iterator[Task]:
    for task in plan.tasks():
        if (not options.rows or task.name in options.rows) and (not options.seeds or task.seed in options.seeds):
            yield task


# ---- reports --------------------------------------------------------------------------------------------------------


def state_of(task: Task, table: Table, beats: Mapping[str, Any], now: float) -> str:
    """Return done, running, cut off, failed or missing, with the progress of the row."""
    if table.has_run(*task):
        return "done"
    beat = beats.get("rows", {}).get(str(task))
    if beat is None:
        return "missing"
    if beat["state"] != "running":
        return str(beat["state"])
    progress = f"step {beat['step']:,}" + (f" of {beat['steps']:,}" if "steps" in beat else "")
    # A row may be silent while its steps are compiled; the runner itself never is.
    if now - beats["at"] > STALE_S:
        return f"cut off at {progress}"
    return f"running, {progress}, for {(now - beat['began']) / 60:.1f} min"


def describe_difference(above: float | None, spread: float, seeds: int) -> str:
    """Return how far a row lies above another one; "none" where that is below the spread over seeds."""
    if above is None:
        return "not compared"
    if seeds < 2:
        return f"{above:+.2f} % (one seed, spread unknown)"
    return f"{'none' if abs(above) < spread else f'{above:+.2f} %'} (spread {spread:.2f}, {seeds} seeds)"


def report(plan: Plan, table: Table) -> None:
    compared = table.compare_rows()
    print(f"\n{'row':17} {'loss':>7}  {'against':17} {'difference':38} {'tokens':>7} {'epochs':>6}  bytes a token up")
    for name in plan.rows:
        if name not in compared:
            continue
        runs, first = table.results[name], table.results.get(plan.rows[name].against, {})
        paired, run = len(runs.keys() & first.keys()), next(iter(runs.values()))
        own = plan.rows[name].against == name
        above, spread = (compared[name][key] for key in ("above_percent", "spread_percent"))
        apart = "" if own else describe_difference(above, spread, paired)
        against = "" if own else plan.rows[name].against
        print(
            f"{name:17} {compared[name]['loss']:7.4f}  {against:17} {apart:38} {run['tokens'] / 1e6:6.0f}M"
            f" {run['epochs']:6.2f}  {run['up_bytes_per_token']:,.0f}"
        )
    for group in GROUPS:
        carry, default = (table.results.get(f"{group.name}-{kind}", {}) for kind in ("carry", "default"))
        if seeds := carry.keys() & default.keys():
            both = compare({seed: carry[seed] for seed in sorted(seeds)}, default)
            difference = describe_difference(both["above_percent"], both["spread_percent"], len(seeds))
            print(f"{group.name}: carry against default {difference}")
    for searched, rate in plan.rates.items():
        edge = rate in (RATES[0], RATES[-1])
        print(
            f"learning rate of {searched}: {rate or 'not searched yet'}{', at the edge of the search' if edge else ''}"
        )


def print_plan(plan: Plan, table: Table, options: argparse.Namespace) -> None:
    total = 0.0
    print(f"{'row':17} {'seed':>4} {'parameters':>10} {'steps':>7} {'tokens':>7} {'pieces':>6} {'minutes':>7}")
    for task in select_tasks(plan, options):
        row, done = plan.rows[task.name], table.has_run(*task)
        minutes = 0.0 if done else expect_s(row, table) / 60
        total += minutes
        size = f"{count_parameters(row.depth) / 1e6:.1f}M"
        state = "done" if done else f"{minutes:.1f}"
        print(
            f"{task.name:17} {task.seed:4} {size:>10} {row.steps:7,} {row.tokens / 1e6:6.0f}M {row.pieces:6} {state:>7}"
        )
    if plan.waiting:
        print(f"waiting for a learning rate: {', '.join(plan.waiting)}")
    print(f"missing: {total:.0f} minutes one after the other, {total / options.side_by_side:.0f} on this many at once")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_mutually_exclusive_group(required=True)
    verbs.add_argument("--list", action="store_true", help="the plan, what is missing and how long it takes")
    verbs.add_argument("--run", action="store_true", help="train what is missing")
    verbs.add_argument("--status", action="store_true", help="done, running, cut off, failed or missing")
    verbs.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="take rows from these tables into --out")
    verbs.add_argument("--train", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="these rows only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="these seeds only")
    parser.add_argument("--side-by-side", type=int, default=1, help="rows at the same time")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no row that would end later; then stop")
    parser.add_argument("--mixed", action="store_true", help="steps compiled and with bf16 autocast")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that all rows run")
    parser.add_argument("--poll", type=float, default=2.0, help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="", help="commit of the source, where git cannot say it")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of a run: table.json, beats.json, logs")
    parser.add_argument("--text", type=Path, default=corpus.BUILD, help="folder of the unpacked text")
    parser.add_argument("--manifests", type=Path, default=corpus.MANIFESTS)
    parser.add_argument("--out", type=Path, help=f"rows that are there are not trained again (default: {RESULTS})")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    options.out = options.out or (options.work / "rows.json" if options.tiny else RESULTS)
    try:
        index = corpus.read_index(options.manifests / "index.json")
    except corpus.CorpusError as error:
        raise SystemExit(str(error)) from None
    shape = shape_of(options)
    if options.train:
        order = read_content(options.train / "order.json")
        run = train_task(order, shape, index, options.text, options.train / "beat.json")
        write_json(options.train / "run.json", run)
        return
    if options.run:
        runner = Runner(options, index)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            runner.run()
        except (SystemExit, KeyboardInterrupt):
            runner.stop()
            raise
    if options.join:
        join(options, shape, index)
    path = options.out if options.list or options.join else options.work / "table.json"
    plan = Plan(shape, index, read_content(path))
    table = open_table(path, plan, {} if path.exists() else describe_table(shape, index, options.mixed))
    if options.list:
        print_plan(plan, table, options)
    if options.status:
        beats = read_content(options.work / "beats.json")
        for task in select_tasks(plan, options):
            print(f"{task!s:22} {state_of(task, table, beats, time.time())}")
    report(plan, table)


def join(options: argparse.Namespace, shape: Shape, index: corpus.Index) -> None:
    """Add the rows of other tables to the results."""

    # All files are read first: a search that is in one of them decides which rows the others may have.
    merged: dict[str, dict[str, Any]] = {"rows": {}, "results": {}}
    for content in map(read_content, (options.out, *options.join)):
        merged["rows"] |= content.get("rows", {})
        for name, runs in content.get("results", {}).items():
            merged["results"].setdefault(name, {}).update(runs)
    rows = Plan(shape, index, merged).rows
    join_tables(options.out, options.join, lambda path, about: Table(path, about, rows))


if __name__ == "__main__":
    main()
