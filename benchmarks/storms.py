"""The storm with several seeds against several calm runs, all at the same time, each on cores of its own.

    python benchmarks/storms.py --seeds 7 8 9 --calm 5 --cores 2

The final loss of one calm run is no firm ground (docs/chaos.md), so the storms are held against the mean of several.
A machine needs (seeds + calm runs) × cores cores; without that many, --cores 0 runs one after the other. The folders of
the runs stay in --keep. Exit code 1: a limit of the plan does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from seeds import find_commit

from atoll.chaos import performance
from atoll.chaos.performance import ChaosRun
from atoll.chaos.plan import FaultPlan, load_plan
from atoll.numerics import kernels
from atoll.observe.summary import summarise
from atoll.store.rundir import RunDir
from atoll.telemetry.events import versions

ROOT = Path(__file__).resolve().parent.parent
FIGURES = (
    *("reason", "goodput", "merged_share", "participation", "effective_h", "effective_h_mean", "effective_h_p95"),
    *("rounds", "validation_loss_end", "longest_gap_s", "median_gap_s", "wall_s", "total_s"),
)
CALM = -1
"""The seed of a run in peace."""


def read_plan(path: Path, seed: int) -> FaultPlan:
    plan = load_plan(path)
    return performance.without_faults(plan) if seed == CALM else msgspec.structs.replace(plan, seed=seed)


def start_run(plan: Path, seed: int, folder: Path, cores: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, __file__, "--plan", str(plan), "--one", str(seed), "--keep", str(folder)]
    with Path(f"{folder}.log").open("wb") as log:
        return subprocess.Popen(["taskset", "-c", cores, *words] if cores else words, stdout=log, stderr=log)


def perform_all(options: argparse.Namespace, folders: dict[Path, int]) -> None:
    """All at once on cores of their own, or one after the other."""
    free = sorted(os.sched_getaffinity(0))
    if options.cores and options.cores * len(folders) > len(free):
        raise SystemExit(f"{len(folders)} runs on {options.cores} cores each: there are {len(free)}; try --cores 0")
    going = []
    for number, (folder, seed) in enumerate(folders.items()):
        mine = free[number * options.cores : (number + 1) * options.cores]
        going.append(start_run(options.plan, seed, folder, ",".join(map(str, mine))))
        if not options.cores:
            going[-1].wait()
    began = time.monotonic()
    while left := sum(run.poll() is None for run in going):
        print(f"{time.monotonic() - began:4.0f} s: {left} of {len(going)} go on", flush=True)
        time.sleep(30)
    for run, folder in zip(going, folders, strict=True):
        if run.returncode:
            raise SystemExit(f"{folder.name} ended with exit code {run.returncode}: see {folder}.log")


def summarise_calm(folder: Path) -> dict[str, Any]:
    summary = summarise(performance.read_events(RunDir.open(folder)))
    return {name: summary[name] for name in FIGURES}


def judge_storm(plan: FaultPlan, folder: Path, calm: list[Path]) -> dict[str, Any]:
    findings = performance.judge_run(plan, RunDir.open(folder), [RunDir.open(one) for one in calm])
    document = {"ok": all(one.ok for one in findings), "seed": plan.seed, "faults": len(plan.list_faults())}
    return {**document, "findings": msgspec.to_builtins(findings)}


def measure(options: argparse.Namespace, keep: Path) -> dict[str, Any]:
    kernels.warm()  # once, for all of them
    calm = [keep / f"calm-{number}" for number in range(options.calm)]
    storms = [keep / f"storm-{seed}" for seed in options.seeds]
    perform_all(options, dict.fromkeys(calm, CALM) | dict(zip(storms, options.seeds, strict=True)))
    return {
        "machine": options.machine,
        "cores_per_run": options.cores or "all, one run after the other",
        "commit": options.commit or find_commit(),
        "versions": versions(),
        "calm": [summarise_calm(folder) for folder in calm],
        "storms": [judge_storm(read_plan(options.plan, seed), keep / f"storm-{seed}", calm) for seed in options.seeds],
    }


def print_storms(storms: list[dict[str, Any]]) -> None:
    for storm in storms:
        print(f"seed {storm['seed']}, {storm['faults']} faults")
        for one in storm["findings"]:
            print(f"  {'yes' if one['ok'] else 'NO '} {one['name']}: {one['asked']}: {one['found']}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=ROOT / "examples" / "storm.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--calm", type=int, default=5, help="so many runs in peace")
    parser.add_argument("--cores", type=int, default=2, help="of each run; 0: all, one run after the other")
    parser.add_argument("--keep", type=Path, help="the folder for the runs; without it they are deleted")
    parser.add_argument("--machine", default="", help="in words, for the result")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "storms.json")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if options.one is not None:
        performance.run_plan(ChaosRun(read_plan(options.plan, options.one), RunDir.create(options.keep)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        keep = options.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        result = measure(options, keep)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_storms(result["storms"])
    return 0 if all(storm["ok"] for storm in result["storms"]) else 1


if __name__ == "__main__":
    sys.exit(main())
