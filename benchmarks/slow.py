"""How much of a slow learner's work is merged, in real processes.

    python benchmarks/slow.py [--factors 1.5 2 4] [--adopt overwrite carry] [--steps 200]

Four learners with pretended steps of 0.4 s, the last of them slower by a factor. For each factor and way of adopting:
the share of each learner's fragment-tokens that was merged, the run's effective H, and whether anybody was muted. The
script that the learners run is this file with no arguments.
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
from statistics import mean, median
from typing import Any

from atoll.store.event_parts import read_lines

HERE = Path(__file__).resolve()
STEP_S = 0.4
LEAST = {"overwrite": {1.5: 0.88, 2.0: 0.85, 4.0: 0.75}, "carry": {1.5: 0.96, 2.0: 0.96, 4.0: 0.96}}


def train() -> None:
    """One learner: a model of 24 equal tensors whose steps take as long as they are told to."""
    import torch

    import atoll

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(256, 256)) for _ in range(24)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with atoll.Learner(model, optimizer) as learner:
        step_s = STEP_S * (float(os.environ["SLOW_FACTOR"]) if learner.name == "learner-3" else 1.0)
        while not learner.done:
            began = time.perf_counter()
            for parameter in model:
                parameter.grad = 1e-3 * torch.randn_like(parameter)
            optimizer.step()
            time.sleep(max(0.0, began + step_s - time.perf_counter()))
            learner.step(tokens=1000)


def measure(folder: Path, factor: float, adopt: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "atoll.cli", "train", str(HERE), "--learners", "4", "--steps", str(steps)]
    command += ["--set", f"adopt={adopt}", "--out", str(folder), "--json", "--set", "evaluate_every=0"]
    environment = {**os.environ, "SLOW_FACTOR": str(factor)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout)
    events = [json.loads(line) for line in read_lines(folder / "events.jsonl")]
    since = [m["since"] for e in events if e["kind"] == "round" for m in e["members"] if m["since"] is not None]
    fast = [
        m["since"]
        for e in events
        if e["kind"] == "round"
        for m in e["members"]
        if m["since"] is not None and m["learner"] != "learner-3"
    ]
    shares = {name: one["merged_share"] for name, one in summary["per_learner"].items()}
    least = LEAST[adopt].get(factor, 0.0)
    return {
        "factor": factor,
        "adopt": adopt,
        "merged_share": shares,
        "slow": shares["learner-3"],
        "least": least,
        "effective_h": summary["effective_h"],
        "effective_h_of_the_fast": {"median": median(fast), "mean": round(mean(fast), 2)},
        "effective_h_of_all": {"median": median(since), "mean": round(mean(since), 2)},
        "participation": summary["participation"],
        "muted": sum(e["kind"] == "muted" for e in events),
        "wall_s": summary["wall_s"],
        "holds": shares["learner-3"] >= least and not any(e["kind"] == "muted" for e in events),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0, 4.0])
    parser.add_argument("--adopt", nargs="+", default=["overwrite", "carry"])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for adopt in options.adopt:
            for factor in options.factors:
                result = measure(Path(scratch) / f"{adopt}-{factor}", factor, adopt, options.steps)
                print(json.dumps(result), flush=True)
                results.append(result)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    told = {**machine, "step_s": STEP_S, "steps": options.steps, "cells": results}
    (HERE.parent / "results" / "slow.json").write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    if "ATOLL_LEARNER" in os.environ or ("SLOW_FACTOR" in os.environ and len(sys.argv) == 1):
        train()
    else:
        raise SystemExit(main())
