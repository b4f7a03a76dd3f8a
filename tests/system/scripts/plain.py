"""A small net on numbers of its own: what it learns depends on nothing but its name and its steps. From step 40 on it
goes slowly until a file is there, so that a test can do something meanwhile."""

import os
import time
from pathlib import Path

import torch

import atoll

torch.manual_seed(3)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
dice = torch.Generator().manual_seed(int(os.environ["ATOLL_LEARNER"].removeprefix("learner-")))
gate = Path("gate")
steps = 0
with atoll.Learner(net, optimizer) as learner:
    while not learner.done:
        batch = torch.randn(8, 6, generator=dice)
        wanted = batch.sum(1) + 0.3 * torch.randn(8, generator=dice)
        loss = (net(batch).squeeze(1) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
        steps += 1
        time.sleep(0.5 if steps > 40 and not gate.exists() else 0.01)
