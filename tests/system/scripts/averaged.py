"""A script that knows nothing of ranks: it accumulates, clips and steps, and writes down the samples of each step.

`PASSES`: backward passes of a step, each on a batch of its own; `--no-sync`: all but the last in learner.no_sync();
`--deferred`: the last too; `--uneven`: the second process makes one pass more; `--paced`: 20 steps a second, so that
what is trained while others start costs no processor time, nor its replay. The
gate trains in passes of samples below HALF alone, so some ranks have a gradient of it and others have none.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import atoll

PASSES, BATCH, SAMPLES, HALF, CLIP = 3, 2, 4096, 2048, 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.gate = nn.Linear(6, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        inputs = torch.sin(index[:, None] * torch.arange(1.0, 7.0))
        out = self.body(inputs)
        return out + self.gate(inputs) if index[0] < HALF else out


def loss_of(model: nn.Module, index: torch.Tensor) -> torch.Tensor:
    return (model(index) - torch.cos(index[:, None] * torch.arange(1.0, 4.0))).square().mean()


def make() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    # Ranks begin with the parameters of rank 0, whatever their own are.
    torch.manual_seed(int(os.environ.get("ATOLL_RANK", "0")))
    model, optimizer = make()
    atoll.evaluate(model, lambda model: loss_of(model, torch.arange(HALF)).item())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100_000)
    learner = atoll.Learner(model, optimizer)
    learner.register("schedule", schedule, from_peers=True)
    steps: list[list[list[int]]] = []
    own = "--deferred" in sys.argv
    with learner:
        print("schedule at", schedule.last_epoch, flush=True)
        begun = {name: values.tolist() for name, values in model.state_dict().items()}
        passes: list[list[int]] = []
        for batch in learner.batches(torch.arange(SAMPLES), batch_size=BATCH):
            passes.append(batch.tolist())
            last = len(passes) == PASSES
            with learner.no_sync() if own or ("--no-sync" in sys.argv and not last) else nullcontext():
                (loss_of(model, batch) / PASSES).backward()
            if "--uneven" in sys.argv and learner.index == 1:
                loss_of(model, batch).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                steps.append(passes)
                passes = []
                if "--paced" in sys.argv:
                    time.sleep(0.05)
                learner.step(tokens=PASSES * BATCH)
        index, seed = learner.index, learner.seed
    Path(f"steps-{index}.json").write_text(json.dumps({"seed": seed, "begun": begun, "steps": steps}))


if __name__ == "__main__":
    main()
