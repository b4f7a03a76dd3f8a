"""A model with all that is not merged: a frozen layer, BatchNorm's counter, a buffer of another type."""

import time

import torch

import atoll


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 8).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.head(self.norm(self.base(x)))


torch.manual_seed(0)
model = Net()
data = torch.randn(512, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if __name__ == "__main__":
    with atoll.Learner(model, optimizer) as learner:
        for batch in learner.batches(data, batch_size=8):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            learner.step(tokens=len(batch), loss=loss)
