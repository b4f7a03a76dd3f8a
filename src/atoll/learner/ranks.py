"""A learner is one process, until several ranks are supported: whatever is more ends before training.

Two ranks of one job would fight over one name; under different names they would average their gradients and adopt
different versions, and drift apart without a word. So a process group of several ranks, a torchrun of several, and a
model wrapped or sharded for one (DDP, FSDP, fully_shard) are refused, each with what to do instead. What other
launchers set (SLURM_NTASKS, a bare WORLD_SIZE) says nothing of this process: many jobs of one rank run under it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.protocol.errors import ConfigError

INSTEAD = (
    "start one process per learner: atoll train SCRIPT --learners {count}, without torchrun and init_process_group"
)
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def refuse_several_ranks(model: nn.Module, environment: Mapping[str, str] = os.environ) -> None:
    """ConfigError: this process, or this model, is one part of several."""
    count = _ranks_of_group()
    if count > 1:
        where = f"rank {dist.get_rank()} of a torch.distributed process group of {count}"
        raise ConfigError(f"this process is {where}, and a learner is one rank: {INSTEAD.format(count=count)}")
    count = _ranks_of_torchrun(environment)
    if count > 1:
        raise ConfigError(f"torchrun started {count} ranks, and a learner is one: {INSTEAD.format(count=count)}")
    _refuse_wrapped(model)


def _ranks_of_group() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _ranks_of_torchrun(environment: Mapping[str, str]) -> int:
    """What WORLD_SIZE says where torchrun set it."""
    size = environment.get("WORLD_SIZE", "")
    return int(size) if "TORCHELASTIC_RUN_ID" in environment and size.isdecimal() else 1


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"{where} is wrapped in DistributedDataParallel, and a learner is one rank: "
                "hand the model inside it (its .module) to atoll.Learner, and wrap nothing"
            )
        if _is_sharded(type(module)):
            raise ConfigError(
                f"{where} is sharded ({type(module).__name__}), and a learner holds its model whole: "
                "leave out FullyShardedDataParallel and fully_shard, and start one process per learner"
            )
    for name, parameter in model.named_parameters():
        if _is_of(type(parameter), "DTensor") or _is_of(type(parameter.data), "DTensor"):
            raise ConfigError(
                f"parameter '{name}' is a DTensor, one shard of several, and a learner holds its model whole: "
                "leave out fully_shard and parallelize_module, and start one process per learner"
            )


def _is_sharded(kind: type) -> bool:
    return any(_is_of(kind, name) for name in SHARDED)


def _is_of(kind: type, name: str) -> bool:
    """By name: to import them costs every learner a second, and a model that is one has them imported already."""
    return any(one.__name__ == name and one.__module__.startswith("torch.distributed") for one in kind.__mro__)
