"""What the decoupled learners and the data-parallel baseline share, so that they differ in the algorithm alone."""

from __future__ import annotations

import torch
from torch import nn

from atoll.workloads.gpt import Gpt, GptConfig
from atoll.workloads.schedule import learning_rate
from atoll.workloads.settings import WorkloadSettings


def build_model(settings: WorkloadSettings, seed: int) -> Gpt:
    """The model with the same initial weights in every process of a run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gpt(GptConfig(depth=settings.depth, block=settings.block))


def build_optimizer(model: nn.Module, settings: WorkloadSettings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, progress: float, settings: WorkloadSettings) -> float:
    lr = learning_rate(progress, settings.lr, settings.warmup, settings.floor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
