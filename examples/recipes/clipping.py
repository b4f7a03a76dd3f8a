"""Clipping by the norm of the gradients, where the loop has it: between backward and step.

atoll train examples/recipes/clipping.py --learners 2 --steps 200
"""

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


def score(model: nn.Module) -> float:
    return compute_loss(model, held_out).item()


atoll.evaluate(model, score)

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=32):
        loss = compute_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # with a GradScaler: scaler.unscale_(optimizer) before
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
