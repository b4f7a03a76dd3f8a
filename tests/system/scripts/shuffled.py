"""A loader of the script's own, shuffled by `learner.seed`: it prints the samples of its first batch."""

import time

import torch
from torch.utils.data import DataLoader

import atoll

data = torch.arange(4096)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

with atoll.Learner(model, optimizer) as learner:
    order = torch.Generator().manual_seed(learner.seed)
    for number, batch in enumerate(DataLoader(data, batch_size=8, shuffle=True, generator=order)):
        if number == 0:
            print("first batch", batch.tolist(), flush=True)
        inputs = batch[:, None] / len(data)
        loss = ((model(inputs) - torch.sin(9 * inputs)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        learner.step(tokens=len(batch), loss=loss)
        if learner.done:
            break
