"""Two weights at 1, each step subtracts 2; the values after every step go to a file. test_train.py knows them."""

import json
import os
from pathlib import Path

import torch

import atoll


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(1))
        self.second = torch.nn.Parameter(torch.ones(1))


model = Two()
history = [[1.0, 1.0]]
with atoll.Learner(model) as learner:
    while not learner.done:
        with torch.no_grad():
            model.first -= 2
            model.second -= 2
        learner.step(tokens=1)
        history.append([model.first.item(), model.second.item()])
Path(f"{os.environ['ATOLL_LEARNER']}.json").write_text(json.dumps(history))
