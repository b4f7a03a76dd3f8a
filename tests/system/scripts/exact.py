"""A small net with everything that a cut must bring back: AdamW, a schedule, dropout, leased data."""

import os
import random

import numpy as np
import torch

import atoll

torch.manual_seed(3)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
inputs = torch.randn(4096, 6, generator=torch.Generator().manual_seed(9))
number = int(os.environ["ATOLL_LEARNER"].removeprefix("learner-"))
torch.manual_seed(number)
random.seed(number)
np.random.seed(number)  # all three are put back, so all three have to begin alike

learner = atoll.Learner(net, optimizer)
learner.register("schedule", schedule)
with learner:
    for batch in learner.batches(inputs, batch_size=8):
        loss = (net(batch).squeeze(1) - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        learner.step(tokens=len(batch), loss=loss)
