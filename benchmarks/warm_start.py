"""A warm start over a link that cannot carry it: which H its phases get, whether anybody waits, and the loss.

    python benchmarks/warm_start.py [--mbit 1] [--steps 300] [--share 0.3] [--pace 0.5] [--depth 2]

Two learners train the built-in GPT in real processes, each step at least `--pace` seconds long. Three runs of the same
steps: without a warm start, with one over loopback, and with one where each learner has a link of `--mbit` Mbit/s each
way to the syncer (a relay in user space, links.py). The warm start is the shipped one: H = 2, τ = 1, plain averaging,
carry. It prints and saves for every run the H that each phase was asked for and got, how long `learner.step()` held
training up in each step, and the validation loss at the end. The order of rounds is that of real processes, so no two
runs are the same: a loss is one draw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "warm_start.json"
LEARNERS = 2
HELD = "WARM_START_HELD"


def train() -> None:
    """A learner, or the evaluator: the built-in workload, with every call of `learner.step()` timed."""
    import atoll
    from atoll.workloads import builtin

    held: list[float] = []
    step = atoll.Learner.step

    def timed(learner: atoll.Learner, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return step(learner, *arguments, **named)
        finally:
            held.append(time.perf_counter() - began)

    atoll.Learner.step = timed  # type: ignore[method-assign]
    builtin.main()
    Path(os.environ[HELD], f"held-{os.getpid()}.json").write_text(json.dumps(held))


def run(options: argparse.Namespace, share: float, mbit: float | None) -> dict[str, Any]:
    """One run; `share` of it is a warm start, and `mbit` is None for loopback."""
    from links import Links

    from atoll.chaos.performance import read_events
    from atoll.config import convert
    from atoll.launch.local import LocalRun
    from atoll.observe.summary import summarise
    from atoll.store.rundir import RunDir

    protocol = {"learners": LEARNERS, "steps": options.steps, "warm_start": share, "wait_for_learners_s": 60.0}
    workload = {"depth": options.depth, "pace_s": options.pace}
    config = convert({"protocol": protocol, "workload": workload, "seed": options.seed}, "the benchmark")

    async def start(folder: RunDir) -> None:
        links = Links(argparse.Namespace(mbit=mbit, delay=options.delay), LEARNERS) if mbit is not None else None
        route = links.open_to_syncer if links is not None else None
        try:
            await LocalRun(config, folder, script=[str(HERE)], route=route).run()
        finally:
            if links is not None:
                await links.close()

    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        os.environ[HELD] = scratch
        folder, load = RunDir.create(Path(scratch) / "run"), os.getloadavg()[0]
        asyncio.run(start(folder))
        summary = summarise(read_events(folder))
        held = sorted(one for file in Path(scratch).glob("held-*.json") for one in json.loads(file.read_text())[1:])
    return describe(summary, held, load)


def describe(summary: dict[str, Any], held: list[float], load: float) -> dict[str, Any]:
    whole = {key: summary[key] for key in ("effective_h", "effective_h_mean", "rounds")}
    phases = summary["phases"] or [{**whole, "sync_every": summary["settings"]["sync_every"]}]
    keys = ("sync_every", "effective_h", "effective_h_mean", "rounds")
    return {
        "phases": [{key: one[key] for key in keys} for one in phases],
        "steps": [one["steps"] for one in summary["per_learner"].values()],
        "wall_s": summary["wall_s"],
        "held_ms": {
            "median": round(1000 * median(held), 2),
            "p99": round(1000 * held[int(0.99 * len(held))], 2),
            "longest": round(1000 * held[-1], 2),
        },
        "held_share": round(sum(held) / (LEARNERS * summary["wall_s"]), 4),
        "validation_loss": summary["validation_loss_end"],
        "merged_share": summary["merged_share"],
        "tokens_lost": summary["tokens"]["lost"],
        "participation": summary["participation"],
        "load": round(load, 1),
    }


def main() -> int:
    from seeds import count_cores, find_commit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds, one way")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--pace", type=float, default=0.5)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = {"none": (0.0, None), "unlimited": (options.share, None), "limited": (options.share, options.mbit)}
    result: dict[str, Any] = {
        "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "commit": find_commit(),
        "asked": {key: value for key, value in vars(options).items() if key not in ("out", "note")},
        "note": options.note,
    }
    for name, (share, mbit) in runs.items():
        result[name] = run(options, share, mbit)
        print(name, json.dumps(result[name]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if HELD in os.environ:
        train()
    else:
        raise SystemExit(main())
