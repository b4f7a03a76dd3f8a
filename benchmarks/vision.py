"""How good a vision model with BatchNorm is: learners in real processes against data-parallel at equal images.

    python benchmarks/vision.py --seeds 0 1 2                  # some four minutes on two cores
    python benchmarks/vision.py --rows dp default --steps 100 --out small.json

A CNN of 24,778 parameters reads digits in noise (vision_learner.py). Rows of learners are trained by `atoll train`, M =
4, AdamW, 32 images a learner and step. Data-parallel is one process that takes the images of all learners as one batch,
so its statistics are of larger batches too. BatchNorm's running statistics are merged like the parameters, the default,
or (`local`) stay each learner's own; scored are then those of the run's first learner. Told are loss and errors on
held-out images. No two runs of real processes are the same: seeds show by how much.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from quality import Table, make_parser, train_missing
from quality_processes import run_atoll
from safetensors.torch import load_file
from vision_learner import Task, build_model, build_optimizer, score_model, train_batch, training_images

HERE = Path(__file__).resolve().parent
BATCH, STEPS, PACE_S = 32, 800, 0.05


class VisionRow(msgspec.Struct, frozen=True, kw_only=True):
    learners: int = 4
    words: tuple[str, ...] = ()
    """Settings of the run; none: the defaults."""
    buffers: Literal["mean", "local"] = "mean"
    data_parallel: bool = False
    against: str = "dp"

    @property
    def cost(self) -> tuple[bool]:
        return (self.data_parallel,)


ROWS = {
    "dp": VisionRow(data_parallel=True),
    "default": VisionRow(),
    "h2": VisionRow(words=("warm_start=0.15",)),
    "local": VisionRow(buffers="local"),
    "h2-local": VisionRow(words=("warm_start=0.15",), buffers="local"),
}


def train_together(row: VisionRow, seed: int, steps: int) -> dict[str, Any]:
    """Data-parallel: one model, whose batch is that of all learners."""
    model, dice, data = build_model(seed), torch.Generator().manual_seed(seed), training_images()
    optimizer = build_optimizer(model)
    for step in range(steps):
        images, labels = data[torch.randint(len(data), (row.learners * BATCH,), generator=dice)]
        train_batch(model, optimizer, images, labels, step / steps)
    loss, errors = score_model(model)
    return {"loss": loss, "errors": errors}


def train_apart(row: VisionRow, seed: int, steps: int, pace_s: float, deadline: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out, file = Path(scratch) / "run", Path(scratch) / "model.safetensors"
        task = Task(seed=seed, batch=BATCH, buffers=row.buffers, pace_s=pace_s)
        words = ["train", str(HERE / "vision_learner.py"), "--json", "--out", str(out), "--seed", str(seed)]
        words += ["--learners", str(row.learners), "--tokens", str(row.learners * steps * BATCH)]
        words += [part for word in (*row.words, "wait_for_learners_s=300") for part in ("--set", word)]
        summary = msgspec.json.decode(run_atoll([*words, "--", msgspec.json.encode(task).decode()], deadline, False))
        run_atoll(["export", str(out), str(file)], deadline, False)
        model = build_model(seed)
        found = model.load_state_dict(load_file(file), strict=False)
        assert not found.unexpected_keys, found
        assert all(key.endswith("num_batches_tracked") for key in found.missing_keys), found
    loss, errors = score_model(model)
    told = ("effective_h_mean", "goodput", "merged_share")
    phases = [{key: one[key] for key in ("sync_every", "effective_h_mean")} for one in summary["phases"]]
    return {"loss": loss, "errors": errors, **{key: summary[key] for key in told}, "phases": phases}


def report(table: Table) -> None:
    print(f"\n{'row':10} {'loss':>7} {'errors':>7} seeds  against data-parallel; H asked and got")
    for name, one in table.compare_rows().items():
        runs = list(table.results[name].values())
        errors = sum(run["errors"] for run in runs) / len(runs)
        apart = "" if one["above_percent"] is None else f"{one['above_percent']:+.2f} % ({one['spread_percent']:.2f})"
        got = ", ".join(f"{p['sync_every']}: {p['effective_h_mean']}" for p in runs[0].get("phases", []))
        got = got or str(runs[0].get("effective_h_mean", ""))
        print(f"{name:10} {one['loss']:7.4f} {errors:7.2%} {len(runs):5}  {apart}; {got}")


def main() -> None:
    parser = make_parser(__doc__, ROWS, HERE / "results" / "vision.json")
    parser.set_defaults(steps=STEPS, batch=BATCH)
    parser.add_argument("--pace", type=float, default=PACE_S, help="seconds that a learner's step lasts at least")
    options = parser.parse_args()
    if options.list:
        report(Table(options.out, {}, ROWS))
        return
    torch.set_num_threads(1)
    table = Table(options.out, {"steps": options.steps, "batch": BATCH, "pace_s": options.pace}, ROWS)

    def train_row(name: str, seed: int, deadline: float) -> dict[str, Any]:
        row, began = ROWS[name], time.monotonic()
        trained = (
            train_together(row, seed, options.steps)
            if row.data_parallel
            else train_apart(row, seed, options.steps, options.pace, deadline)
        )
        return {**trained, "seconds": round(time.monotonic() - began, 1)}

    train_missing(table, options, train_row)
    report(table)


if __name__ == "__main__":
    main()
