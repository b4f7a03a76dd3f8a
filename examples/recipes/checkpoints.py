"""Checkpoints of the script's own, beside the snapshots of the run.

atoll train examples/recipes/checkpoints.py --learners 2 --steps 200 -- checkpoints
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
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

folder = Path(sys.argv[1] if sys.argv[1:] else "checkpoints")


def save(name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "draft")
    (folder / "draft").replace(folder / name)


with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=32):
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
        if learner.index == 0 and learner.steps % 50 == 0:
            save(f"step-{learner.global_step:06}.safetensors")  # this learner's own parameters
if learner.index == 0 and (learner.alone or learner.finished):
    save("final.safetensors")  # the run's
