"""A straight line whose learners can be made to do harm: their parameters drift away while they do.

Options: --while FILE (as long as that file is there), --from STEP and --to STEP (of their own), --broken-at LOSS (a
loss above it is scored as not a number).
"""

import argparse
import os
import time
from pathlib import Path

import torch

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--while", dest="file", type=Path, default=Path("never"))
parser.add_argument("--from", dest="start", type=int, default=0)
parser.add_argument("--to", dest="stop", type=int, default=0)
parser.add_argument("--broken-at", type=float, default=float("inf"))
said = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
held_out = torch.randn(64, 4, generator=torch.Generator().manual_seed(9))


def score(model: torch.nn.Module) -> float:
    with torch.no_grad():
        loss = ((model(held_out) - 2 * held_out - 1) ** 2).mean().item()
    return loss if loss < said.broken_at else float("nan")


if os.environ["ATOLL_ROLE"] == "learner":
    with atoll.Learner(model, optimizer) as learner:
        while not learner.done:
            x = torch.randn(16, 4)
            loss = ((model(x) + 0.3 * torch.randn(16, 4) - 2 * x - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if said.start <= learner.steps < said.stop or said.file.exists():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.4
            time.sleep(0.02)
            learner.step(tokens=16, loss=loss)
else:
    atoll.evaluate(model, score)
