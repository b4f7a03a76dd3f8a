"""Whether H stays what was asked when a round takes many steps: a model of 160M parameters, in real processes.

    python benchmarks/flights.py [--learners 2] [--parameters 160e6] [--step 0.3] [--steps 200] [--set KEY=VALUE ...]

Steps are pretended: a sleep, and one number of every tensor changed. Everything else is real: copies, Δ, digests,
loopback, merge, fsync of every round. Prints effective H, the measured overlap, rounds under way and seconds from
freezing to commit, over the rounds after the first three cycles; with the machine's load before and after.
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
FRAGMENTS = 24
WARM_UP = 3


def train() -> None:
    """One learner: 24 equal tensors, and steps that take as long as they are told to."""
    import torch

    import atoll

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step_s, size = float(os.environ["STEP_S"]), int(float(os.environ["PARAMETERS"])) // FRAGMENTS
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size // 256, 256)) for _ in range(FRAGMENTS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held: dict[str, list[float]] = {"held": [], "ends": []}
    with atoll.Learner(model, optimizer) as learner:
        while not learner.done:
            began = time.perf_counter()
            with torch.no_grad():
                for parameter in model:
                    parameter[0] += 1e-3
            time.sleep(max(0.0, began + step_s - time.perf_counter()))
            began = time.perf_counter()
            learner.step(tokens=1000)
            held["held"].append(time.perf_counter() - began)
            held["ends"].append(time.perf_counter())
    if folder := os.environ.get("HELD"):
        told = {"learner": os.environ.get("ATOLL_LEARNER", ""), **held}
        Path(folder, f"held-{os.getpid()}.json").write_text(json.dumps(told))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "atoll.cli", "train", str(HERE), "--learners", str(options.learners)]
    command += ["--steps", str(options.steps), "--out", str(folder), "--json", "--set", "evaluate_every=0"]
    for word in ("cut_every=0", *options.set):
        command += ["--set", word]
    environment = {**os.environ, "STEP_S": str(options.step), "PARAMETERS": str(options.parameters)}
    before = os.getloadavg()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout)
    rounds = [json.loads(line) for line in read_lines(folder / "events.jsonl")]
    rounds = [event for event in rounds if event["kind"] == "round"][WARM_UP * FRAGMENTS : -FRAGMENTS]
    since = [m["since"] for event in rounds for m in event["members"] if m["since"] is not None]
    return {
        "effective_h": {"median": median(since), "mean": round(mean(since), 2)} if since else None,
        "effective_h_of_all": summary["effective_h"],
        "overlap": summary.get("overlap"),
        "round_s": round(median(event["sync_s"] for event in rounds), 3) if rounds else None,
        "merge_s": round(median(event["merge_s"] for event in rounds), 3) if rounds else None,
        "rounds": summary["rounds"],
        "steps": [one["steps"] for one in summary["per_learner"].values()],
        "participation": summary["participation"],
        "merged_share": summary["merged_share"],
        "goodput": summary["goodput"],
        "load": {"before": before, "after": os.getloadavg()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=160e6)
    parser.add_argument("--step", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch) / "run", options)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"asked": {**vars(options), "sync_every": 24}, **found, "on": machine}, indent=1))


if __name__ == "__main__":
    train() if "PARAMETERS" in os.environ else main()
