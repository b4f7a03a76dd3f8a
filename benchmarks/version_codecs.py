"""What a lossy version codec costs in loss: the small GPT under each codec, on equal batches, in one process.

    python benchmarks/version_codecs.py                     # three seeds, M = 2, 480 steps: minutes
    python benchmarks/version_codecs.py --seeds 0 --steps 96

Streaming DiLoCo without overlap (P = H = 24, a round after every step): merge, outer step, encoding and feedback are
the syncer's own (`syncer/parameters.py`), contributions go up in fp32. Writes a JSON file with losses and bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment, make_plan
from atoll.protocol.messages import TensorSpec
from atoll.syncer.parameters import Parameters
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizer, set_learning_rate, validation_loss

P = 24
CODECS = ("fp32", "bf16", "int8", "int4")


def views(model: Gpt, part: Fragment) -> Iterator[tuple[slice, FloatArray]]:
    tensors = dict(model.named_parameters())
    for piece, place in part.parts:
        rows = tensors[piece.tensor.name].detach().numpy()[piece.first : piece.first + piece.rows]
        yield place, rows.reshape(-1)


def read(model: Gpt, part: Fragment) -> FloatArray:
    values = np.empty(part.size, np.float32)
    for place, own in views(model, part):
        values[place] = own
    return values


def adopt(model: Gpt, part: Fragment, values: FloatArray) -> None:
    for place, own in views(model, part):
        own[:] = values[place]


def train(codec: str, seed: int, learners: int, steps: int, text: Text) -> dict[str, Any]:
    settings, data = WorkloadSettings(), Windows(text, WorkloadSettings().block)
    models = [build_model(settings, seed) for _ in range(learners)]
    optimizers = [build_optimizer(model, settings) for model in models]
    specs = [
        TensorSpec(name, tuple(p.shape), "float32", embedding=name.startswith("embedding"))
        for name, p in models[0].named_parameters()
    ]
    parameters = Parameters(make_plan(specs, P), Outer(), codec)
    for part in parameters.plan.fragments:
        first = read(models[0], part)
        parameters.put_initial(part.index, first, compute_digest(first.view(np.uint8).data))
    parameters.commit_initial()
    dice, sent = np.random.default_rng(seed), 0
    for step in range(steps + P):  # a last cycle without training collects the last steps
        if step < steps:
            for model, optimizer in zip(models, optimizers, strict=True):
                set_learning_rate(optimizer, step / steps, settings)
                model(data.gather(dice.integers(len(data), size=settings.batch))).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimizer.step()
                optimizer.zero_grad()
        part = parameters.plan.fragments[step % P]
        base = parameters.committed_buffers()[part.index]
        deltas = [base.values - read(model, part) for model in models]
        parameters.stage_merge(part.index, deltas, [1.0] * learners)
        sent += len(parameters.round_payload(part.index))
        parameters.commit_version(part.index, base.version + 1, step)
        for model in models:
            adopt(model, part, parameters.committed_buffers()[part.index].values)
    whole = 4 * parameters.plan.size * (steps + P) // P
    return {"loss": validation_loss(models[0], text), "bytes": sent, "of_fp32": sent / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/version_codecs.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, results = Text.load(()), {codec: dict[str, Any]() for codec in CODECS}
    for seed in options.seeds:
        for codec in CODECS:
            results[codec][str(seed)] = one = train(codec, seed, options.learners, options.steps, text)
            print(f"seed {seed} {codec:5} loss {one['loss']:.4f}  {one['of_fp32']:.3f} of fp32's bytes", flush=True)
    for codec, runs in results.items():
        print(f"{codec:5} mean loss {mean(one['loss'] for one in runs.values()):.4f}")
    options.out.write_text(json.dumps({"options": vars(options) | {"out": ""}, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
