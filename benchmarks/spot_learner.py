"""What spot_goodput.py trains: a small model whose steps last 0.25 s, asleep for nearly all of it."""

import time

import torch

import atoll

STEP_S = 0.25

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
with atoll.Learner(model, optimizer) as learner:
    torch.manual_seed(learner.seed)
    while not learner.done:
        x = torch.randn(16, 64)
        loss = ((model(x) + 0.3 * torch.randn_like(x) - 2 * x - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        learner.step(tokens=16, loss=loss)
