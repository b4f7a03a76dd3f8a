"""Validation on held-out data, with dropout off and two figures, in a process of its own.

atoll train examples/recipes/validation.py --learners 2 --steps 400 --set evaluate_every=20
atoll export RUN best.safetensors --best
"""

import torch
from torch import nn

import atoll

torch.manual_seed(0)
inputs = torch.randn(4096, 8)
classes = (inputs @ torch.randn(8, 3)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs[:-1024], classes[:-1024])
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@torch.no_grad()
def score(model: nn.Module) -> dict[str, float]:
    model.eval()  # of the evaluator's copy: learners go on in their own mode
    logits, labels = model(inputs[-1024:]), classes[-1024:]
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(logits, labels).item(), "accuracy": accuracy.item()}


atoll.evaluate(model, score, directions={"accuracy": "max"})

with atoll.Learner(model, optimizer) as learner:
    for features, labels in learner.batches(dataset, batch_size=32):
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(labels), loss=loss)
