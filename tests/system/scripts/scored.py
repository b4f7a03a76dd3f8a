"""A small classifier with a scorer of several figures. Imported, it gives the model and the scorer alone."""

import torch
from torch import nn

import atoll

torch.manual_seed(0)
inputs = torch.randn(640, 8)
classes = (inputs @ torch.randn(8, 3)).argmax(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


@torch.no_grad()
def score(model: nn.Module) -> dict[str, float]:
    found = model(inputs[512:])
    hits = (found.argmax(1) == classes[512:]).float().mean()
    return {"loss": nn.functional.cross_entropy(found, classes[512:]).item(), "accuracy": hits.item()}


if __name__ == "__main__":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    atoll.evaluate(model, score, directions={"accuracy": "max"})
    with atoll.Learner(model, optimizer) as learner:
        while not learner.done:
            some = torch.randint(0, 512, (32,))
            loss = nn.functional.cross_entropy(model(inputs[some]), classes[some])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=32, loss=loss)
