"""Learners in lockstep in one process: what codecs do to the loss, without any system around it.

    python benchmarks/lockstep.py                                         # the small GPT on a CPU, M = 2: minutes
    python benchmarks/lockstep.py --depth 10 --block 256 --batch 16 --lr 1e-3 --learners 4 --steps 1000     # on a GPU

Streaming DiLoCo without overlap (P = H = 24, a round after every step). Encoding and feedback up, merge, outer step,
encoding and feedback down are the shipped ones; the batches of a seed are the same for every row. A row is UP/DOWN:
the codec of contributions and that of versions; UP/DOWN@MERGE,LR,MOMENTUM has outer settings of its own. Told are the
validation loss of each seed, its mean against that of the first row (paired: the spread is of the differences), and the
bytes each way beside fp32's. On a GPU every learner's step is a CUDA graph, but with Muon, which needs its learning
rate on the host. What the file has already, of the same options, is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Codec, Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, make_plan
from atoll.protocol.messages import TensorSpec
from atoll.syncer.parameters import Parameters
from atoll.telemetry.events import versions
from atoll.workloads.settings import OPTIMIZERS, WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizers, learning_rate, validation_loss

P = 24
ROWS = ("fp32/fp32", "bf16/fp32", "bf16/bf16", "int8/int8", "int4/int4")


class LockstepLearner:
    def __init__(self, settings: WorkloadSettings, seed: int, device: torch.device) -> None:
        self.model = build_model(settings, seed).to(device)
        self._settings = settings
        self._optimizers = build_optimizers(self.model, settings)
        self._lr = torch.tensor(settings.lr, device=device)
        self._batch = torch.zeros(settings.batch, settings.block + 1, dtype=torch.int64, device=device)
        self._named = dict(self.model.named_parameters())
        self._graph: torch.cuda.CUDAGraph | None = None
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"], group["capturable"] = self._lr, device.type == "cuda"
        if device.type == "cuda" and settings.optimizer == "adamw":
            self._capture()

    def step(self, batch: torch.Tensor, progress: float) -> None:
        self._batch.copy_(batch)
        self._lr.fill_(learning_rate(progress, self._settings.lr, self._settings.warmup, self._settings.floor))
        if self._graph is not None:
            self._graph.replay()
        else:
            self._make_step()

    def _make_step(self) -> None:
        self.model.zero_grad()
        self.model(self._batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip)
        for optimizer in self._optimizers.values():
            optimizer.step()

    def _capture(self) -> None:
        """Steps before a capture are needed, and undone."""
        first = [parameter.detach().clone() for parameter in self.model.parameters()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._make_step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), first, strict=True):
                parameter.copy_(value)
            for state in self._optimizers["adamw"].state.values():
                for value in state.values():
                    value.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._make_step()

    @torch.no_grad()
    def read(self, part: Fragment) -> FloatArray:
        pieces = [self._named[piece.tensor.name][piece.first : piece.first + piece.rows] for piece in part.pieces]
        values: FloatArray = torch.cat([piece.reshape(-1) for piece in pieces]).cpu().numpy()
        return values

    @torch.no_grad()
    def adopt(self, part: Fragment, values: torch.Tensor) -> None:
        for piece, place in part.parts:
            own = self._named[piece.tensor.name][piece.first : piece.first + piece.rows]
            own.copy_(values[place].view(own.shape))


class Sender:
    """A learner's contributions: encoded with feedback, as its courier does it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._feedback: dict[int, FloatArray] = {}
        self.sent = 0

    def contribute(self, part: Fragment, base: FloatArray, theta: FloatArray) -> FloatArray:
        body = np.empty(body_nbytes(self._codec, part), np.uint8)
        rest = np.empty(part.size, np.float32) if self._codec.needs_feedback else None
        encode_contribution(self._codec, part, Delta(base, theta, self._feedback.get(part.index), rest), body)
        if rest is not None:
            self._feedback[part.index] = rest
        self.sent += body.nbytes
        delta = np.empty(part.size, np.float32)
        decode_contribution(self._codec, part, body, delta)
        return delta


def read_row(row: str) -> tuple[str, str, Outer]:
    codecs, _, outer = row.partition("@")
    up, _, down = codecs.partition("/")
    if not outer:
        return up, down, Outer()
    merge, lr, momentum = outer.split(",")
    return up, down, Outer(merge=merge, lr=float(lr), momentum=float(momentum))


def train(row: str, seed: int, settings: WorkloadSettings, learners: int, steps: int, text: Text) -> dict[str, Any]:
    up, down, outer = read_row(row)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, began = Windows(text, settings.block), time.perf_counter()
    islands = [LockstepLearner(settings, seed, device) for _ in range(learners)]
    senders = [Sender(make_codec(up)) for _ in range(learners)]
    named = islands[0].model.named_parameters()
    specs = [TensorSpec(name, tuple(p.shape), "float32", embedding=name.startswith("embedding")) for name, p in named]
    parameters = Parameters(make_plan(specs, P), outer, down)
    for part in parameters.plan.fragments:
        first = islands[0].read(part)
        parameters.put_initial(part.index, first, compute_digest(first.view(np.uint8).data))
    parameters.commit_initial()
    dice, journaled = np.random.default_rng(seed), 0
    for step in range(steps + P):  # a last cycle without training collects the last steps
        if step < steps:
            for one in islands:
                one.step(data.gather(dice.integers(len(data), size=settings.batch)).to(device), step / steps)
        part = parameters.plan.fragments[step % P]
        base = parameters.committed_buffers()[part.index]
        thetas = [one.read(part) for one in islands]
        deltas = [one.contribute(part, base.values, theta) for one, theta in zip(senders, thetas, strict=True)]
        parameters.stage_merge(part.index, deltas, [1.0] * learners)
        journaled += len(parameters.round_payload(part.index))
        parameters.commit_version(part.index, base.version + 1, step)
        values = torch.from_numpy(parameters.committed_buffers()[part.index].values).to(device)
        for one in islands:
            one.adopt(part, values)
    whole = 4 * sum(parameters.plan.fragments[step % P].size for step in range(steps + P))
    return {
        "loss": validation_loss(islands[0].model, text, settings.eval_windows),
        "up_of_fp32": senders[0].sent / whole,
        "down_of_fp32": journaled / whole,
        "parameters": parameters.plan.size,
        "seconds": round(time.perf_counter() - began, 1),
    }


def compare(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Against the first row, over the seeds that both have."""
    found: dict[str, Any] = {}
    first = next(iter(results.values()))
    for row, runs in results.items():
        above = [100 * (one["loss"] / first[seed]["loss"] - 1) for seed, one in runs.items() if seed in first]
        found[row] = {
            "loss": mean(one["loss"] for one in runs.values()),
            "above_percent": mean(above),
            "spread_percent": stdev(above) if len(above) > 1 else 0.0,
        }
    return found


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
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
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
                json.dumps(about | {"results": results, "compared": compare(results)}, indent=1) + "\n"
            )
    for row, one in compare(results).items():
        up, down = (mean(run[key] for run in results[row].values()) for key in ("up_of_fp32", "down_of_fp32"))
        apart = f"{one['above_percent']:+.2f} % (spread {one['spread_percent']:.2f})"
        print(f"{row:9} loss {one['loss']:.4f}  {apart}  bytes up {up:.3f}, down {down:.3f} of fp32's")


if __name__ == "__main__":
    main()
