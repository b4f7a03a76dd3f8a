"""Data-parallel training of a script that knows nothing of ranks (`atoll train --algorithm data-parallel`).

The launcher starts M processes of the script. Together they are one learner of a run whose merges leave the model as it
is (launch/data_parallel.py); here is what makes them one learner. Rules:
- every rank begins with the parameters and buffers of rank 0;
- behind every backward pass the gradients are averaged over the ranks, before the script sees them: what it clips,
  scales or logs is the mean;
- passes may be accumulated: to average a sum of which a part is averaged already is to average the sum, since
  mean(mean(a) + b) = mean(a) + mean(b). In `learner.no_sync()` ranks keep their own, and one pass behind it averages;
- a parameter that has a gradient on some ranks counts as zero on the others; where no rank has one, it keeps none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from atoll.learner.model import trained
from atoll.learner.ranks import MEET_S, reach_ranks
from atoll.protocol.errors import ConfigError, RunFailed

BUCKET_BYTES = 32 * 2**20
"""Gradients that are averaged at once: what is needed beside them is no more than this, or one of them."""


def count_averaging_ranks() -> int:
    """Return the number of ranks that the launcher started for data-parallel training, or 1."""
    return int(os.environ.get("ATOLL_RANKS", "1"))


def join_averaging_ranks() -> None:
    """Make the process group of the ranks that the launcher started. ConfigError: the script has made one itself."""
    if dist.is_initialized():
        raise ConfigError(
            "the script makes a process group of its own, and --algorithm data-parallel would make another: "
            "leave its torch.distributed.init_process_group out, or train it with --ranks"
        )
    with reach_ranks():
        dist.init_process_group(
            os.environ["ATOLL_BACKEND"],
            init_method=os.environ["ATOLL_MEETING"],
            rank=int(os.environ["ATOLL_RANK"]),
            world_size=count_averaging_ranks(),
            timeout=timedelta(seconds=MEET_S),
        )


class GradientAverage:
    """The hooks that average the gradients of one model."""

    def __init__(self, model: nn.Module, count_steps: Callable[[], int]) -> None:
        """`count_steps`: how many steps this rank has made, by which passes of different steps are told apart."""
        self._parameters = list(trained(model).values())
        self._count_steps = count_steps
        self._deferring = False
        self.deferred = False
        """Whether the last backward pass left gradients that are this rank's own."""
        self._passing = -1
        """Number that torch gave the backward pass behind which gradients are averaged next."""
        _copy_from_first([*model.parameters(), *model.buffers()])
        self._handles = [one.register_post_accumulate_grad_hook(self._note_gradient) for one in self._parameters]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let each rank keep its own gradients."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if self._deferring:
            self.deferred = True
        elif self._passing != (passing := torch._C._current_graph_task_id()):
            self._passing = passing
            # Called at the end of the backward pass under way. DDP and FSDP2 have no other way to know of it either.
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self.deferred = False
        step = self._count_steps()
        facts = torch.tensor([step, -step, *(one.grad is not None for one in self._parameters)], dtype=torch.int64)
        with reach_ranks():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        latest, earliest = int(facts[0]), -int(facts[1])
        if latest != earliest:
            raise RunFailed(
                f"one rank is in step {latest + 1} and another in step {earliest + 1}: under --algorithm data-parallel "
                "every process has to call backward equally often in each step"
            )
        gradients = [_gradient_of(one) for one, some in zip(self._parameters, facts[2:].tolist(), strict=True) if some]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(dist.get_world_size())
            with reach_ranks():
                dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view(one.shape) for one, part in zip(bucket, parts, strict=True)])


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        raise ConfigError("--algorithm data-parallel averages dense gradients: build embeddings without sparse=True")
    return parameter.grad


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, on every rank alike."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _copy_from_first(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        values = tensor.detach().contiguous()
        with reach_ranks():
            dist.broadcast(values.reshape(-1).view(torch.uint8), 0)  # as bytes: gloo does not know every type
        tensor.detach().copy_(values)
