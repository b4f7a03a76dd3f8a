"""Several ranks in one learner: their process group shares a model by FSDP2 or DDP, and all of them are one learner.

Two learners of two ranks:      atoll train examples/ranks.py --learners 2 --ranks 2 --steps 200
The same with DDP:              atoll train examples/ranks.py --learners 2 --ranks 2 --steps 200 -- ddp
One group, without a run:       torchrun --nproc-per-node 2 examples/ranks.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll

torch.manual_seed(0)  # every rank and every learner begins with the same weights and the same data
inputs = torch.randn(4096, 8)
samples = torch.cat([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True)], dim=1)
dataset, held_out = samples[:-512], samples[-512:]
model = nn.Sequential(nn.Linear(8, 65), nn.GELU(), nn.Linear(65, 65), nn.GELU(), nn.Linear(65, 1))


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])


def score(model: nn.Module) -> float:
    return compute_loss(model, held_out).item()


atoll.evaluate(model, score)  # before the model is dealt out: the evaluator is one process, and holds it whole

device = torch.device("cpu")
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model.to(device)
    if sys.argv[1:] == ["ddp"]:
        model = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(dataset, batch_size=32):  # each rank has samples of its own
        loss = compute_loss(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(batch), loss=loss)  # of this rank
if dist.is_initialized():
    dist.destroy_process_group()
