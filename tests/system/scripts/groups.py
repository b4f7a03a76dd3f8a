"""A loader whose sampler repeats every prompt four times in a row, as trainers of groups (GRPO) have it.

A batch that mixes prompts ends the script. Prints the prompts it begins with.
"""

import sys
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler

import atoll
from atoll.integrations.loaders import lease_samples

GROUP = 4


class RepeatSampler(Sampler[int]):
    """Every prompt GROUP times, in a shuffled order."""

    def __init__(self, prompts: int, seed: int) -> None:
        self.prompts = prompts
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.prompts * GROUP

    def __iter__(self) -> Iterator[int]:
        for prompt in torch.randperm(self.prompts, generator=self.generator).tolist():
            yield from [prompt] * GROUP


torch.manual_seed(0)
prompts = torch.randn(38, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(prompts, batch_size=2 * GROUP, sampler=RepeatSampler(len(prompts), seed=42))
with atoll.Learner(model, optimizer) as learner:
    lease_samples(loader, learner)
    while not learner.done:
        for batch in loader:
            groups = batch.unflatten(0, (-1, GROUP))
            if not (groups == groups[:, :1]).all():
                sys.exit("a group of one prompt was torn apart")
            if learner.steps == 0:
                print("begins with", [int((prompts == group[0]).all(1).nonzero()) for group in groups], flush=True)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            learner.step(tokens=len(batch), loss=loss)
            if learner.done:
                break
