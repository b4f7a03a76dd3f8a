"""Two optimizers, each with a schedule of its own: SGD trains the layers below, AdamW the head.

Alone it just trains:           python examples/two_optimizers.py
Two learners train one model:   atoll train examples/two_optimizers.py --learners 2 --steps 200
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import atoll

torch.manual_seed(0)
inputs = torch.randn(4096, 8)
samples = torch.cat([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True)], dim=1)
dataset, held_out = samples[:-512], samples[-512:]
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])


def score(model: nn.Module) -> float:
    return compute_loss(model, held_out).item()


below = torch.optim.SGD(model[:-1].parameters(), lr=0.02, momentum=0.9)
head = torch.optim.AdamW(model[-1].parameters(), lr=3e-3)
schedules = {"below": StepLR(below, 100, gamma=0.7), "head": LambdaLR(head, lambda t: 1 / (1 + t / 500))}
atoll.evaluate(model, score)

learner = atoll.Learner(model, {"below": below, "head": head})  # or a list: [below, head]
for name, schedule in schedules.items():
    learner.register(name, schedule, from_peers=True)  # saved with cuts; a learner that comes late takes a peer's
with learner:
    for batch in learner.batches(dataset, batch_size=32):
        loss = compute_loss(model, batch)
        loss.backward()
        for optimizer in (below, head):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules.values():
            schedule.step()
        learner.step(tokens=len(batch), loss=loss)
