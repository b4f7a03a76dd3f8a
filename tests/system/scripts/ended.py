"""A noisy line in 20 ms per step, with a scorer of its own: what the table of ends and resumes trains.

Options: --trouble FILE (ends with a sentence while the file is there), --deaf FILE (goes on when the run has ended,
while the file is there), --slow FILE (half a second per step from step 60 on, while the file is there: a test can end
the run before its budget is spent, on a machine however crowded).
"""

import argparse
import sys
import time
from pathlib import Path

import torch

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--trouble", type=Path)
parser.add_argument("--deaf", type=Path)
parser.add_argument("--slow", type=Path)
said = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return ((model(x) - 2 * x - 1) ** 2).mean()


held_out = torch.randn(64, 4)
atoll.evaluate(model, lambda model: loss_of(model, held_out).item())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
with atoll.Learner(model, optimizer) as learner:
    while not learner.done or (said.deaf is not None and said.deaf.exists()):
        x = torch.randn(16, 4)
        loss = ((model(x) + 0.3 * torch.randn_like(x) - 2 * x - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        slow = said.slow is not None and learner.steps > 60 and said.slow.exists()
        time.sleep(0.5 if slow else 0.02)
        learner.step(tokens=16, loss=loss)
        if said.trouble is not None and said.trouble.exists():
            sys.exit(f"{said.trouble} is there: take it away")
