"""A noisy line whose steps begin by the clock, 40 ms apart: rounds come at a steady pace, whatever a step costs."""

import time

import torch

import atoll

STEP_S = 0.04

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(16, 4)
        loss = ((model(x) + 0.3 * torch.randn_like(x) - 2 * x - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S - time.monotonic() % STEP_S)
        learner.step(tokens=16, loss=loss)
