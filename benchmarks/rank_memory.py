"""What a rank's processes hold: a learner of one process against one of FSDP2 ranks, a model of 160M parameters.

    python benchmarks/rank_memory.py [--ranks 2] [--parameters 160e6] [--steps 96] [--step 0.2] [--set KEY=VALUE ...]

Steps are pretended: a sleep, and one row of every shard changed; so nothing but Atoll ever needs more than a shard.
The model is made on the meta device. Told is the highest resident memory of a rank's training process and of its
courier (with shared memory, which both count), in bytes for each parameter of the whole model: of a model of a tenth
of the size it is less, and the difference is what grows with the model. A rank that held another's shard at any time,
even one fragment of it at the largest, would be above its share of what the learner of one process has.
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
from typing import Any

from atoll.telemetry.events import versions

HERE = Path(__file__).resolve()
TENSORS = 24
WIDTH = 256


def read_highest(pid: int | str) -> int:
    """The most bytes that were resident so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def find_courier() -> int:
    """The courier is the one child of a training process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(int(pid) for pid in children if b"atoll.courier" in Path(f"/proc/{pid}/cmdline").read_bytes())


def train() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    import atoll

    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rows = int(float(os.environ["PARAMETERS"])) // TENSORS // WIDTH
    if size > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
    with torch.device("meta"):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(rows, WIDTH)) for _ in range(TENSORS)])
    if size > 1:
        fully_shard(model)
    model.to_empty(device="cpu")
    shards = [(p.to_local() if size > 1 else p).detach() for p in model.parameters()]
    for shard in shards:
        shard.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with atoll.Learner(model, optimizer) as learner:
        courier = find_courier()
        while not learner.done:
            for shard in shards:
                shard[:1] += 1e-3
            time.sleep(float(os.environ["STEP_S"]))
            learner.step(tokens=1000)
            told = {
                "shard_bytes": sum(shard.nbytes for shard in shards),
                "training_bytes": read_highest("self"),
                "courier_bytes": read_highest(courier),
            }
    Path(os.environ["TOLD"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
    if size > 1:
        dist.destroy_process_group()


def measure(scratch: Path, ranks: int, parameters: float, options: argparse.Namespace) -> dict[str, Any]:
    folder = scratch / f"{ranks}-{parameters:.0f}"
    command = [sys.executable, "-m", "atoll.cli", "train", str(HERE), "--learners", "1", "--ranks", str(ranks)]
    command += ["--steps", str(options.steps), "--out", str(folder), "--json", "--set", "evaluate_every=0"]
    for word in options.set:
        command += ["--set", word]
    told = folder.with_name(f"{folder.name}-told")
    told.mkdir()
    env = {"ATOLL_TRAIN": "1", "STEP_S": str(options.step), "PARAMETERS": str(parameters), "TOLD": str(told)}
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    each = [json.loads((told / f"{rank}.json").read_text()) for rank in range(ranks)]
    summary = json.loads(done.stdout)
    return {"ranks": each, "rounds": summary["rounds"], "effective_h": summary["effective_h"]}


def compare(scratch: Path, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    small = measure(scratch, ranks, options.parameters / 10, options)
    large = measure(scratch, ranks, options.parameters, options)
    found: dict[str, Any] = {"small": small, "large": large}
    for process in ("training", "courier"):
        grown = [
            more[f"{process}_bytes"] - less[f"{process}_bytes"]
            for less, more in zip(small["ranks"], large["ranks"], strict=True)
        ]
        found[f"{process}_bytes_per_parameter"] = round(max(grown) / (0.9 * options.parameters), 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=160e6)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a pretended step takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "rank_memory.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain, ranks = compare(Path(scratch), 1, options), compare(Path(scratch), options.ranks, options)
    result = {
        "parameters": options.parameters,
        "plain": plain,
        "ranks": ranks,
        "share": {
            key: round(ranks[key] / plain[key], 3)
            for key in ("training_bytes_per_parameter", "courier_bytes_per_parameter")
        },
        "commit": options.commit,
        "machine": platform.machine(),
        "versions": versions(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    if os.environ.get("ATOLL_TRAIN") and os.environ.get("ATOLL_LEARNER"):
        train()
    else:
        sys.exit(main())
