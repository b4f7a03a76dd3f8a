"""The baseline: data-parallel training of the same model, one process per rank, gradients averaged at every step.

Same initial weights, batch per rank, optimizer, clipping and learning-rate schedule as the decoupled learners, so that
a difference in loss is the algorithm's. All gradients live in one flat buffer: one all-reduce per step.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ATOLL_RUN_TOML=run.toml ATOLL_STEPS=2000 \\
        python -m atoll.workloads.data_parallel          # rank 0 prints its reports as lines of JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.protocol.errors import AtollError, ConfigError
from atoll.workloads.gpt import Gpt
from atoll.workloads.ranks import PEER_DEADLINE
from atoll.workloads.settings import WorkloadSettings, read_run
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import StepPace, build_model, build_optimizers, sample, set_learning_rate, validation_loss

PrintFigures = Callable[[dict[str, object]], None]
PROGRESS_EVERY = 20


class FlatGradients:
    """Every parameter's gradient as a view of one buffer, so that averaging and clipping are one operation each."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in parameters]
        self.buffer = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self.buffer, sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def average(self, world: int) -> None:
        if world > 1:
            dist.all_reduce(self.buffer)
            self.buffer.div_(world)

    def clip(self, limit: float) -> None:
        self.buffer.mul_(torch.clamp(limit / (self.buffer.norm() + 1e-6), max=1.0))

    def clear(self) -> None:
        self.buffer.zero_()


def batch_indices(size: int, batch: int, seed: int, rank: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches of dataset indices: each rank its own permutation of the whole, a new one every epoch."""
    if size < batch:
        raise ConfigError(
            f"the training part has {size} windows, too few for workload.batch = {batch}: set a smaller one"
        )
    rng = np.random.default_rng((seed, rank))
    while True:
        order = rng.permutation(size)
        for start in range(0, size - batch + 1, batch):
            yield order[start : start + batch]


def train_step(
    model: nn.Module,
    optimizers: dict[str, torch.optim.Optimizer],
    gradients: FlatGradients,
    batch: Tensor,
    world: int,
    clip: float,
    pace: StepPace | None = None,
) -> Tensor:
    gradients.clear()
    loss: Tensor = model(batch)
    loss.backward()
    if pace is not None:
        pace.sleep_rest()
    gradients.average(world)
    gradients.clip(clip)
    for optimizer in optimizers.values():
        optimizer.step()
    return loss.detach()


def train_rank(settings: WorkloadSettings, rank: int, world: int, steps: int, seed: int, report: PrintFigures) -> None:
    """Train `steps` steps as one of `world` ranks; rank 0 reports.

    Reports, by their `kind`: `start` (parameters, data digest), `progress` (step, loss, tokens of all ranks),
    `validation` (step, validation_loss: at the start, every `eval_every` steps, at the end) and `end` (wall_s, sample).
    `wall_s` and `train_s` count from the first step; `train_s` leaves the validations out.
    """
    text = Text.load(settings.data)
    model = build_model(settings, seed)
    with _ProcessGroup(rank, world):
        _train(settings, model, text, rank, world, steps, seed, report if rank == 0 else _silent)


def _train(
    settings: WorkloadSettings,
    model: Gpt,
    text: Text,
    rank: int,
    world: int,
    steps: int,
    seed: int,
    report: PrintFigures,
) -> None:
    dataset = Windows(text, settings.block)
    optimizers = build_optimizers(model, settings)
    gradients, pace = FlatGradients(model), StepPace(settings.pace_s)
    indices = batch_indices(len(dataset), settings.batch, seed, rank)
    tokens_per_step = settings.batch * settings.block * world
    scored_s = 0.0

    def score(step: int) -> None:
        nonlocal scored_s
        if rank == 0:
            began = time.perf_counter()
            loss = validation_loss(model, text, settings.eval_windows)
            scored_s += time.perf_counter() - began
            report({"kind": "validation", "step": step, "tokens": step * tokens_per_step, "validation_loss": loss})

    report({"kind": "start", "parameters": gradients.buffer.numel(), "data": text.name, "digest": text.digest})
    start = time.perf_counter()
    score(0)
    for step in range(1, steps + 1):
        pace.begin_step()
        set_learning_rate(optimizers, (step - 1) / steps, settings)
        batch = dataset.gather(next(indices))
        loss = train_step(model, optimizers, gradients, batch, world, settings.clip, pace)
        if step % PROGRESS_EVERY == 0 or step == steps:
            report({"kind": "progress", "step": step, "tokens": step * tokens_per_step, "loss": float(loss)})
        if step % settings.eval_every == 0 or step == steps:
            score(step)
    wall_s = time.perf_counter() - start
    report(
        {"kind": "end", "step": steps, "wall_s": wall_s, "train_s": wall_s - scored_s, "sample": sample(model, seed)}
    )


class _ProcessGroup:
    """The gloo process group while training; nothing for a world of one."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __enter__(self) -> None:
        if self.world > 1:
            if os.environ.get("MASTER_ADDR", "127.0.0.1") in {"127.0.0.1", "localhost"} and sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves nowhere does no harm
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world, timeout=PEER_DEADLINE)

    def __exit__(self, *_: object) -> None:
        if self.world > 1:
            dist.destroy_process_group()


def _silent(_: dict[str, object]) -> None:
    """Ranks other than 0 say nothing."""


def rank_main() -> int:
    """One rank as a process of its own, told by its environment what to do."""
    torch.set_num_threads(int(os.environ.get("ATOLL_THREADS", "1")))
    try:
        settings, seed = read_run(Path(os.environ["ATOLL_RUN_TOML"]))
        rank, world, steps = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "ATOLL_STEPS"))
        train_rank(settings, rank, world, steps, seed, lambda line: print(json.dumps(line), flush=True))
    except KeyError as missing:
        print(
            f"environment variable {missing} is not set; `atoll train --algorithm data-parallel` sets it",
            file=sys.stderr,
        )
        return 2
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(rank_main())
