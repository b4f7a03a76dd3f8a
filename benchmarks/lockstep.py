"""Learners in lockstep in one process: what codecs do to the loss, without any system around it.

    python benchmarks/lockstep.py                                         # the small GPT on a CPU, M = 2: minutes
    python benchmarks/lockstep.py --depth 10 --block 256 --batch 16 --lr 1e-3 --learners 4 --steps 1000     # on a GPU

Streaming DiLoCo without overlap (P = H = 24, a round after every step), by the engine of lockstep_engine.py. A row is
UP/DOWN: the codec of contributions and that of versions; UP/DOWN@MERGE,LR,MOMENTUM has outer settings of its own. Told
are the validation loss of each seed, its mean against that of the first row (paired: the spread is of the differences),
and the bytes each way beside fp32's. What the file has already, of the same options, is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from lockstep_engine import Row, compare, prepare_torch
from lockstep_engine import train as train_row

from atoll.telemetry.events import versions
from atoll.workloads.settings import OPTIMIZERS, WorkloadSettings
from atoll.workloads.text import Text

ROWS = ("fp32/fp32", "bf16/fp32", "bf16/bf16", "int8/int8", "int4/int4")


def read_row(row: str, learners: int, settings: WorkloadSettings) -> Row:
    codecs, _, outer = row.partition("@")
    up, _, down = codecs.partition("/")
    plain = Row(learners=learners, overlap=0, up=up, down=down, optimizer=settings.optimizer, lr=settings.lr)
    if not outer:
        return plain
    merge, lr, momentum = outer.split(",")
    return msgspec.structs.replace(plain, merge=merge, outer_lr=float(lr), outer_momentum=float(momentum))


def train(row: str, seed: int, settings: WorkloadSettings, learners: int, steps: int, text: Text) -> dict[str, Any]:
    found = train_row(read_row(row, learners, settings), seed, settings, steps, text, numerics="host", scores=1)
    return {
        "loss": found["loss"],
        "up_of_fp32": found["up_bytes"] / found["whole_bytes"],
        "down_of_fp32": found["down_bytes"] / found["whole_bytes"],
        "parameters": found["parameters"],
        "seconds": found["seconds"],
    }


def compare_rows(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Against the first row."""
    first = next(iter(results.values()))
    return {row: compare(runs, first) for row, runs in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = WorkloadSettings()
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="UP/DOWN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=480)
    for name in ("depth", "block", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--lr", type=float, default=usual.lr)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=usual.optimizer)
    parser.add_argument("--data", nargs="+", default=[], help="text; without it, Python's standard library")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lockstep.json"))
    options = parser.parse_args()
    prepare_torch()
    shape = {key: getattr(options, key) for key in ("learners", "steps", "depth", "block", "batch", "lr", "optimizer")}
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    of = {"optimizer": "adamw", **kept.get("options", {})}
    results: dict[str, dict[str, Any]] = kept["results"] if of == shape else {}
    settings = WorkloadSettings(**{key: shape[key] for key in ("depth", "block", "batch", "lr", "optimizer")})
    text = Text.load(options.data)
    for seed in map(str, options.seeds):
        for row in options.rows:
            if seed in results.setdefault(row, {}):
                continue
            one = train(row, int(seed), settings, options.learners, options.steps, text)
            results[row][seed] = one | {"commit": options.commit}
            print(f"seed {seed} {row:9} loss {one['loss']:.4f}  {one['seconds']} s", flush=True)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            about = {"options": shape, "device": device, "versions": versions(), "text_bytes": len(text.train)}
            options.out.write_text(
                json.dumps(about | {"results": results, "compared": compare_rows(results)}, indent=1) + "\n"
            )
    for row, one in compare_rows(results).items():
        up, down = (mean(run[key] for run in results[row].values()) for key in ("up_of_fp32", "down_of_fp32"))
        apart = f"{one['above_percent']:+.2f} % (spread {one['spread_percent']:.2f})"
        print(f"{row:9} loss {one['loss']:.4f}  {apart}  bytes up {up:.3f}, down {down:.3f} of fp32's")


if __name__ == "__main__":
    main()
