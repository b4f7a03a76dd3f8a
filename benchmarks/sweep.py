"""Which outer learning rate, momentum and merge rule are best: many decoupled runs side by side, one line each.

python benchmarks/sweep.py --jobs 2 --steps 2000 --grid "outer_lr=0.5,0.7 outer_momentum=0.5,0.6 merge=rda,mean"
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from parity import TOKENS_PER_STEP, figures
from runs import train


def settings(grid: str) -> list[dict[str, str]]:
    axes = [(name, values.split(",")) for name, _, values in (part.partition("=") for part in grid.split())]
    return [
        dict(zip([name for name, _ in axes], point, strict=True)) for point in itertools.product(*(v for _, v in axes))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="append", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0, help="cores of its own for every job; 0: all share all")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after this long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sweep.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * options.minutes
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for job in range(options.jobs):
        first = job * options.cores
        free.put(f"{first}-{first + options.cores - 1}" if options.cores else "")

    def one(point: dict[str, str]) -> None:
        if time.time() > deadline:
            return
        budget = ["--tokens", str(options.learners * options.steps * TOKENS_PER_STEP)]
        flags = [text for key, value in point.items() for text in flag(key, value)]
        if point.get("algorithm") == "data-parallel" or "sync" in point:
            budget = ["--steps", str(options.steps)]
        began, cores = time.time(), free.get()
        try:
            common = ["--learners", str(options.learners), *budget, "--set", "evaluate_every=1000"]
            summary = train([*common, *flags], cores=cores)
        except RuntimeError as error:
            print(point, error, flush=True)
            return
        finally:
            free.put(cores)
        result = {"settings": point, **figures(summary), "total_s": round(time.time() - began, 1)}
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['loss']:.4f} H {result['effective_h']} in {result['participation']} {point}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, [point for grid in options.grid for point in settings(grid)]))


def flag(key: str, value: str) -> list[str]:
    name = f"--{key.replace('_', '-')}"
    return [name] if value == "" else [name, value]


if __name__ == "__main__":
    main()
