"""A training script as you may have one already; the lines that mention atoll are all it takes.

Alone it just trains:            python examples/my_script.py
Four learners train one model:   atoll train examples/my_script.py --learners 4 --steps 300
"""

import argparse
import inspect

import torch
from torch import nn

import atoll

text = torch.tensor(list(inspect.getsource(argparse).encode()))
windows = text.unfold(0, 65, 16)  # 65 bytes each, a new one every 16
dataset, held_out = windows[:-100], windows[-96:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.rnn = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.rnn(self.embedding(x[:, :-1]))[0]).mT, x[:, 1:])


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
atoll.evaluate(model, lambda model: model(held_out).item())

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=16):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=batch.numel(), loss=loss)
