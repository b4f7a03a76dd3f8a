"""Weights that drift one way, so that a contribution is as long as it has steps. Learners from learner-2 on wait in the
folder of the first argument until there are two of them, and join at once."""

import os
import sys
import time
from pathlib import Path

import torch

import atoll

torch.set_num_threads(1)
number = int(os.environ["ATOLL_LEARNER"].removeprefix("learner-"))
if number >= 2:
    folder = Path(sys.argv[1])
    (folder / f"waits-{number}").touch()
    while len(list(folder.glob("waits-*"))) < 2:
        time.sleep(0.02)
net = torch.nn.ParameterList(torch.zeros(256) for _ in range(24))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
dice = torch.Generator().manual_seed(number)
with atoll.Learner(net, optimizer) as learner:
    while not learner.done:
        for weights in net:
            weights.grad = -1.0 - torch.randn(256, generator=dice)
        optimizer.step()
        learner.step(tokens=32)
        time.sleep(0.02)
