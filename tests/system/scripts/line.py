"""A noisy line: what the system tests train when the model does not matter. Without noise the loss
would come to 0, where the norm of a contribution jumps from one to the next, and some would be refused.

Options: --width N, --odd N (the width that learner-1 has, which joins once the run has begun), --nan-at STEP (learner-1
has a loss that is not a number, once), --steps N (leaves by itself), --deaf (goes on when the run has ended),
--placement-of-learner-0 (the others choose),
--poor (hardly any memory is free), --rate (the learning rate), --pace (seconds that a step takes, at least).
"""

import argparse
import asyncio
import os
import time

import torch

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("--odd", type=int, default=0)
parser.add_argument("--nan-at", type=int, default=0)
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--placement-of-learner-0")
parser.add_argument("--poor", action="store_true")
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--pace", type=float, default=0.02)
said = parser.parse_args()

if said.poor:
    import atoll.mailbox.box

    atoll.mailbox.box.available_bytes = lambda: 4096

second = os.environ.get("ATOLL_LEARNER") == "learner-1"
width = said.odd if said.odd and second else said.width
while said.odd and second:
    from atoll.fabric.transfer import get_json

    if asyncio.run(get_json(os.environ["ATOLL_SYNCER"], "/v1/status"))["phase"] != "waiting":
        break
    time.sleep(0.05)
torch.manual_seed(0)
model = torch.nn.Linear(width, width)
optimizer = torch.optim.SGD(model.parameters(), lr=said.rate, momentum=0.5)
broken = False

placement = None if second else said.placement_of_learner_0
with atoll.Learner(model, optimizer, placement=placement) as learner:
    while (said.deaf or not learner.done) and (not said.steps or learner.steps < said.steps):
        x = torch.randn(16, width)
        loss = ((model(x) + 0.3 * torch.randn_like(x) - 2 * x - 1) ** 2).mean()
        if said.nan_at and second and learner.steps >= said.nan_at and not broken:
            broken = True
            loss = loss * float("nan")  # in the gradients, so in the optimizer's momentum: no adoption heals that
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(said.pace)
        learner.step(tokens=16, loss=loss)
