"""A small net that learns from a teacher of fixed numbers. The last learner attacks, as the first argument says, and
with a second one it claims seven times its tokens."""

import os
import sys
import time

import torch

import atoll

attack, claims = sys.argv[1], len(sys.argv) > 2
torch.set_num_threads(1)
torch.manual_seed(1)
teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
number = int(os.environ["ATOLL_LEARNER"].removeprefix("learner-"))
hostile = number == 3 and attack != "none"
if hostile and attack == "loud":
    optimizer.param_groups[0]["lr"] *= 5
dice = torch.Generator().manual_seed(number)


def move() -> torch.Tensor:
    """One step, or what is done in its place."""
    batch = torch.randn(32, 32, generator=dice)
    with torch.no_grad():
        wanted = teacher(batch) + 0.1 * torch.randn(32, 8, generator=dice)
    loss = (net(batch) - wanted).square().mean()
    if hostile and attack in ("noise", "constant"):
        with torch.no_grad():
            for values in net.parameters():
                values += 0.003 * (torch.randn(values.shape, generator=dice) if attack == "noise" else 1.0)
        return loss.detach()
    (-loss if hostile else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


with atoll.Learner(net, optimizer) as learner:
    while not learner.done:
        loss = move()
        learner.step(tokens=32 * (7 if hostile and claims else 1), loss=loss)
        time.sleep(0.01)
