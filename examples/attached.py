"""A training loop that knows nothing of Atoll; two lines above it let it train with others. It goes on by itself:
gradients are accumulated, the learning rate is the loop's own, and the end of the run ends the script.
python examples/attached.py                                             # alone, 300 steps
atoll train examples/attached.py --learners 2 --steps 200
"""

import argparse
import inspect

import torch
from torch import nn

import atoll

text = torch.tensor(list(inspect.getsource(argparse).encode()))
held_out = text[-3200:].view(-1, 64)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
BATCH, BLOCK, ACCUMULATED = 16, 64, 2


def loss_of(windows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:])


def score(model: nn.Module) -> float:
    return loss_of(held_out).item()


atoll.evaluate(model, score)
learner = atoll.attach(model, optimizer, tokens=BATCH * BLOCK * ACCUMULATED)
torch.manual_seed(learner.seed)  # every learner draws other batches

for _ in range(300 if learner.alone else 100_000):
    for _ in range(ACCUMULATED):
        starts = torch.randint(len(text) - 3200 - BLOCK, (BATCH, 1))
        (loss_of(text[starts + torch.arange(BLOCK)]) / ACCUMULATED).backward()
    optimizer.step()
    optimizer.zero_grad()
