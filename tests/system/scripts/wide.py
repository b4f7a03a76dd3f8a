"""A net wide enough that a syncer of several shards cuts its tensors, on data that each learner draws for itself: equal
settings give equal bits in every run that is synchronous."""

import os

import torch

import atoll

torch.set_num_threads(1)
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(640, 900), torch.nn.Tanh(), torch.nn.Linear(900, 640))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
number = int(os.environ["ATOLL_LEARNER"].removeprefix("learner-"))
drawn = torch.Generator().manual_seed(number)

with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(4, 640, generator=drawn)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=4, loss=loss)
