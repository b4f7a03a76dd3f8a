"""As the cells of a notebook: `one_kernel.py SYNCER NAME STEPS...` joins a run once for each number of steps, and
leaves it between them; 0: it stays until the run is done."""

import sys

import torch
from torch import nn

import atoll

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


where, name, *cells = sys.argv[1:]


def train(steps: int) -> atoll.Learner:
    learner = atoll.attach(model, optimizer, tokens=8, at_end="go on", syncer=where, name=name)
    while not learner.done and (not steps or learner.steps < steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    learner.leave()
    return learner


for steps in map(int, cells):
    print(repr(train(steps)), flush=True)
