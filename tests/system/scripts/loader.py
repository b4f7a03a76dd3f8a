"""Leased samples through a DataLoader of the script's own, whose two workers add noise of their own to each of them."""

import time

import torch
from torch.utils.data import DataLoader

import atoll


class Noisy:
    def __len__(self) -> int:
        return 5000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 5000) + 0.1 * torch.randn(4)


torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

with atoll.Learner(model, optimizer) as learner:
    for batch in DataLoader(Noisy(), batch_sampler=learner.sampler(Noisy(), 16), num_workers=2, prefetch_factor=3):
        loss = ((model(batch) + 0.3 * torch.randn_like(batch) - 2 * batch - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        learner.step(tokens=16, loss=loss)
