"""Muon for the hidden matrices, AdamW for embedding, head and biases: both in one Learner. Needs torch 2.9 or newer.

Alone it just trains:            python examples/muon.py
Two learners train one model:    atoll train examples/muon.py --learners 2 --steps 200
"""

import inspect
import textwrap

import torch
from torch import nn

import atoll

text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 8)  # 8 bytes and the one that follows
dataset, held_out = windows[:-512], windows[-512:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Sequential(nn.Linear(8 * 16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 256)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(self.embedding(batch[:, :-1]).flatten(1)))
        return nn.functional.cross_entropy(logits, batch[:, -1])


def score(model: nn.Module) -> float:
    return model(held_out).item()


torch.manual_seed(0)
model = Net()
matrices = [p for p in model.hidden.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
# With match_rms_adamw the steps of both are of one size, so that one learning rate fits both.
muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(rest, lr=3e-3)
atoll.evaluate(model, score)

with atoll.Learner(model, {"muon": muon, "adamw": adamw}) as learner:
    for batch in learner.batches(dataset, batch_size=32):
        loss = model(batch)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
