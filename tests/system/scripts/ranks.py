"""A learner of a layout: plain, lone (FSDP2 on one rank), ddp, fsdp, hsdp, tp, fsdp-tp. All ranks train on
the same data, so that the mean of their gradients is the gradient of one of them, to the bit. WIDE: a net of which a
syncer of several shards cuts a tensor. OTHER_RANK: the rank that has another net than the others."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import atoll

layout, pace_s = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
torch.set_num_threads(1)
one, two = (601, 901) if os.environ.get("WIDE") else (8, 5)
one += one % 2 and layout.endswith("tp")  # torch's tensor parallel takes no uneven shards of what it multiplies
one += os.environ.get("OTHER_RANK") == str(rank)
layers = (nn.Linear(6, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU(), nn.Linear(two, 3, bias=False))
model: nn.Module = nn.Sequential(*layers)
if layout == "lone":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
elif layout != "plain":
    dist.init_process_group("gloo")
if layout == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif layout in ("lone", "fsdp", "hsdp", "validating", "unsharded"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, size // 2), ("replicate", "shard")) if layout == "hsdp" else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if layout == "unsharded":
        model.set_reshard_after_backward(False)
elif layout == "tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
elif layout == "fsdp-tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
with atoll.Learner(model, optimizer) as learner:
    draws = torch.Generator().manual_seed(int(learner.name.rpartition("-")[2]))  # whoever comes first
    while not learner.done:
        inputs, targets = torch.randn(8, 6, generator=draws), torch.randn(8, 3, generator=draws)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=64 // {"tp": 1, "fsdp-tp": 2}.get(layout, size), loss=loss)
        if layout == "validating":  # after a forward pass alone FSDP leaves parameters whole
            with torch.no_grad():
                model(inputs)
        time.sleep(pace_s)
    if folder := os.environ.get("ENDS"):
        torch.save({"steps": learner.steps}, Path(folder, f"{learner.name}-{rank}.pt"))
if layout != "plain":
    dist.destroy_process_group()
