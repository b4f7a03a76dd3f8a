"""A script of a user, small enough to be run everywhere: one pass over its data alone, as long as the run in a run."""

import torch

import atoll

torch.manual_seed(3)
torch.set_num_threads(1)
inputs = torch.randn(800, 6)
dataset = torch.cat([inputs, inputs.sum(1, keepdim=True)], dim=1)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def score(model: torch.nn.Module) -> torch.Tensor:
    return (model(dataset[:100, :6]) - dataset[:100, 6:]).square().mean()


atoll.evaluate(model, lambda model: score(model).item())
with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=8):
        loss = (model(batch[:, :6]) - batch[:, 6:]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)
