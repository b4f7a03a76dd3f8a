"""A tiny model on leased data: what the kill storms train. A token is a sample here.

Options: --samples N, --batch N, --epochs N (0: no end), --pace (seconds that a step takes, at least).
"""

import argparse
import os
import time
import zlib

import torch

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--epochs", type=int, default=0)
parser.add_argument("--pace", type=float, default=0.01)
said = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
data = torch.randn(said.samples, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
torch.manual_seed(zlib.crc32(os.environ["ATOLL_LEARNER"].encode()))

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(data, said.batch, epochs=said.epochs):
        loss = ((model(batch) - batch.sum(1, keepdim=True) - torch.randn(len(batch), 1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(said.pace)
        learner.step(tokens=len(batch), loss=loss)
