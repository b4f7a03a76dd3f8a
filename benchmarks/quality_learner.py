"""The learner of quality_processes.py: a script on `atoll.Learner`, as a user would write it.

It trains what quality.py trains: the same model, text, loss, inner optimizer and schedule over the run's progress, and
with `mixed` the same steps, compiled and in bf16 autocast. Steps are compiled before the learner joins, so that all
begin together. Its one argument is a `Task` as JSON. At its end it writes down how long its steps took.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
import torch
from lockstep_engine import prepare_torch

import atoll
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import StepPace, build_model, build_optimizers, set_learning_rate, validation_loss


class Task(msgspec.Struct, frozen=True, kw_only=True):
    workload: WorkloadSettings
    seed: int
    mixed: bool
    times: str
    """The folder that a `StepTimes` goes to."""
    pace_s: float = 0.0
    """A step lasts at least so long, …"""
    warm_pace_s: float = 0.0
    """… and so long in the first share of the run."""
    warm_share: float = 0.0
    factors: tuple[float, ...] = ()
    """By learner, how many times as long; none: all the same."""


class StepTimes(msgspec.Struct):
    """Of one training process, without its first step."""

    learner: str
    steps: int = 0
    """With the first one."""
    paced_s: float = 0.0
    """What the steps would have taken at their pace."""
    each_s: list[float] = []
    """From the end of a step to the end of the next."""
    held_s: list[float] = []
    """How long `learner.step()` took of that."""

    @property
    def median_s(self) -> float:
        return median(self.each_s)


class Trainer:
    def __init__(self, task: Task, device: torch.device) -> None:
        self.settings, self._device = task.workload, device
        self.model = build_model(self.settings, task.seed).to(device)
        self.optimizers = build_optimizers(self.model, self.settings)
        self._forward = torch.compile(self.model, dynamic=False) if task.mixed else self.model
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=task.mixed)

    def compile_step(self) -> None:
        self._compute_gradients(torch.zeros(self.settings.batch, self.settings.block + 1, dtype=torch.int64))
        self.model.zero_grad()

    def make_step(self, batch: torch.Tensor, progress: float) -> torch.Tensor:
        set_learning_rate(self.optimizers, progress, self.settings)
        loss = self._compute_gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if self._device.type == "cuda":  # else `learner.step()` would be blamed for what the GPU has still to do
            torch.cuda.synchronize()
        return loss

    def _compute_gradients(self, batch: torch.Tensor) -> torch.Tensor:
        with self._autocast:
            loss = self._forward(batch.to(self._device))
        loss.backward()
        return loss.detach()


def train(task: Task, trainer: Trainer, text: Text) -> StepTimes:
    settings = task.workload
    tokens = settings.batch * settings.block
    usual = trainer.optimizers if len(trainer.optimizers) > 1 else trainer.optimizers["adamw"]
    with atoll.Learner(trainer.model, usual, data=text.digest, tokens_per_step=tokens) as learner:
        times, ended = StepTimes(learner.name), 0.0
        factor = task.factors[learner.index] if task.factors else 1.0
        for batch in learner.batches(Windows(text, settings.block), batch_size=settings.batch):
            pace_s = factor * (task.warm_pace_s if learner.progress < task.warm_share else task.pace_s)
            pace = StepPace(pace_s)
            pace.begin_step()
            loss = trainer.make_step(batch, learner.progress)
            pace.sleep_rest()
            began = time.perf_counter()
            learner.step(tokens=tokens, loss=loss)
            before, ended = ended, time.perf_counter()
            times.steps += 1
            if times.steps > 1:
                times.paced_s += pace_s
                times.each_s.append(ended - before)
                times.held_s.append(ended - began)
    return times


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    prepare_torch()
    trainer = Trainer(task, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    text = Text.load(task.workload.data)
    windows = task.workload.eval_windows
    atoll.evaluate(trainer.model, lambda model: validation_loss(model, text, windows), unit="nats per byte")
    trainer.compile_step()
    times = train(task, trainer, text)
    Path(task.times, f"{times.learner}-{os.getpid()}.json").write_bytes(msgspec.json.encode(times))


if __name__ == "__main__" and "ATOLL_ROLE" in os.environ:
    main()
