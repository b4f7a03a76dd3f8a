"""The built-in GPT in several ranks: their process group, and the model dealt out to them.

Ranks are those that the environment names (RANK, WORLD_SIZE, LOCAL_RANK), as `atoll train --ranks` and torchrun set it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.workloads.gpt import Gpt

PEER_DEADLINE = timedelta(seconds=120)
"""A rank that waits longer for another ends, and with it the group."""


def count_ranks() -> int:
    """Of this process's group; 1: there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def join_ranks() -> Iterator[torch.device]:
    """Where this process trains, as one rank of its group; alone there is no group."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return
    device = _choose_device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PEER_DEADLINE)
    yield device
    dist.destroy_process_group()  # not after an error: that would wait for a peer that is gone


def _choose_device(local_rank: int, local_count: int) -> torch.device:
    """A GPU of its own, as NCCL wants it; the CPU for all where there are too few."""
    return torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_count else torch.device("cpu")


def spread_model(model: Gpt, device: torch.device, parallel: str) -> nn.Module:
    """What a rank trains: to be called before optimizers are made, since FSDP replaces the parameters."""
    if not dist.is_initialized():
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh  # a learner of one rank starts without them
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (count_ranks(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
