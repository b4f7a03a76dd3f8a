"""What lossy contributions cost: validation loss and bytes up with fp32, int4 and topk, on the small GPT.

    python benchmarks/lossy.py                 # three seeds, M = 2, H = 8, 500 steps: some minutes on 2 idle cores
    python benchmarks/lossy.py --learners 4 --sync-every 24 --steps 2100

`topk-plain` is topk with mean, no outer momentum and an outer rate of 1: what waits in the feedback is momentum enough.
Synchronous runs: members and steps of every round are the same for all; losses differ by codec and outer step alone.
Prints a table and writes a JSON file with every figure, after every run; what the file has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from atoll.launch.replay.recording import read_recording
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.numerics.fragments import make_plan
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.rundir import RunDir

sys.path.insert(0, str(Path(__file__).parent))
from runs import train

CASES: dict[str, tuple[str, ...]] = {
    "fp32": ("codec=fp32",),
    "int4": ("codec=int4",),
    "topk": ("codec=topk",),
    "topk-plain": ("codec=topk", "merge=mean", "outer_momentum=0", "outer_lr=1.0"),
}
LOSS_LIMITS = {"int4": 0.3, "topk": 1.0, "topk-plain": 1.0}
"""How far above that of fp32 the loss may lie, in percent."""
BYTES_LIMITS = {"int4": 7.5, "topk": 20.0, "topk-plain": 20.0}
"""How many times fewer bytes a contribution has, at least."""


def measure(case: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        out = RunDir(Path(scratch) / "run")
        rules = ("synchronous=true", f"sync_every={options.sync_every}", "evaluate_every=1000", *CASES[case])
        words = ["--learners", str(options.learners), "--seed", str(seed), "--steps", str(options.steps)]
        summary = train([*words, *(word for rule in rules for word in ("--set", rule))], out.path)
        score = read_recording(record for _, record in read(out.journal, disk=LocalDisk()))
    settings = score.begun.settings
    plan = make_plan(score.begun.tensors, settings.fragments, settings.plan)
    body = sum(body_nbytes(make_codec(settings.codec), part) for part in plan.fragments)
    return {
        "loss": summary["validation_loss_end"],
        "bits_per_value": 8 * body / plan.size,
        "contributions": sum(len(part.copies) for part in score.parts),
        "rounds": score.rounds,
        "commit": commit(),
        "load": os.getloadavg()[0],
        "wall_s": summary["wall_s"],
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def describe(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "options": {"learners": options.learners, "steps": options.steps, "sync_every": options.sync_every},
    }


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


def compare(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Against fp32, over the seeds that both have."""
    found: dict[str, dict[str, float]] = {}
    whole = results.get("fp32", {})
    for case, by_seed in results.items():
        if seeds := [seed for seed in by_seed if seed in whole]:
            loss, best = (mean(one[seed]["loss"] for seed in seeds) for one in (by_seed, whole))
            bits = by_seed[seeds[0]]["bits_per_value"]
            above = 100 * (loss / best - 1)
            found[case] = {"loss": loss, "loss_above_percent": above, "bytes_fewer": 32 / bits}
    return found


def report(compared: dict[str, dict[str, float]]) -> int:
    worst = 0
    for case, one in compared.items():
        print(
            f"{case:10} mean loss {one['loss']:.4f} ({one['loss_above_percent']:+.2f} %), "
            f"bodies {one['bytes_fewer']:.1f} times smaller"
        )
        too_high = one["loss_above_percent"] > LOSS_LIMITS.get(case, 0.0)
        worst = max(worst, int(too_high or one["bytes_fewer"] < BYTES_LIMITS.get(case, 0.0)))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sync-every", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lossy.json"))
    options = parser.parse_args()
    about, results = describe(options), read_results(options.out)
    for seed in options.seeds:
        for case in options.cases:
            if str(seed) in results.get(case, {}):
                continue
            began = time.time()
            result = measure(case, seed, options)
            results.setdefault(case, {})[str(seed)] = result
            print(f"seed {seed} {case:10} loss {result['loss']:.4f}  {time.time() - began:4.0f} s", flush=True)
            compared = compare(results)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({**about, "results": results, "compared": compared}, indent=1) + "\n")
    return report(compare(results))


if __name__ == "__main__":
    sys.exit(main())
