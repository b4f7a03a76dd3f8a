"""A line that says every step it makes."""

import torch

import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(16, 4)
        loss = ((model(x) - 2 * x - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", learner.steps + 1)
        learner.step(tokens=16, loss=loss)
