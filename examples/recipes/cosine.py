"""A cosine learning rate with warm-up that follows the run.

atoll train examples/recipes/cosine.py --learners 2 --steps 300
atoll train --resume RUN --steps 600 --set progress=added    # once more from the warm-up
"""

import math

import torch
from torch import nn

import atoll

torch.manual_seed(0)
inputs = torch.randn(4096, 8)
samples = torch.cat([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True)], dim=1)
dataset, held_out = samples[:-512], samples[-512:]
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])


def scale_rate(progress: float, warm_up: float = 0.05, least: float = 0.1) -> float:
    if progress < warm_up:
        return max(0.01, progress / warm_up)
    return least + (1 - least) * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))) / 2


def score(model: nn.Module) -> float:
    return compute_loss(model, held_out).item()


atoll.evaluate(model, score)

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=32):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * scale_rate(learner.progress)
        if learner.steps % 20 == 0:
            print(f"progress {learner.progress:.3f}, learning rate {optimizer.param_groups[0]['lr']:.6f}", flush=True)
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
