"""Train with steps whose bits are the same on every machine: the learner that tools/decisions.py records.

Gradients are small multiples of 2^-6 drawn by NumPy, the learning rate and the momentum are powers of two, and no sum
has more than two terms. So no step rounds anything, and it makes no difference which instructions torch uses.

Options: --layout NAME (`plain`, or `fsdp` over the ranks of the process group), --wide (fragments too large for work on
an event loop), --leave-after STEP (learner-1 leaves by itself after this step), --device (learner-1 encodes what it
sends, as on a GPU). A learner joins once the file `may-join-NUMBER` is there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("--layout", choices=("plain", "fsdp"), default="plain")
parser.add_argument("--wide", action="store_true")
parser.add_argument("--leave-after", type=int, default=0)
parser.add_argument("--device", action="store_true")
options = parser.parse_args()

SHAPES = ((6, 301), (1400, 640), (3, 40)) if options.wide else ((6, 10), (9, 5), (3, 4))


class Tensors(nn.Module):
    """Tensors whose gradients are exactly what `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        draws = np.random.default_rng(0)
        self.tensors = nn.ParameterList(
            nn.Parameter(torch.from_numpy(draws.integers(-64, 65, shape).astype(np.float32) / 64)) for shape in SHAPES
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.tensors, gradients, strict=True)]).sum()


torch.set_num_threads(1)
model = Tensors()
if options.layout == "fsdp":
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
if "ATOLL_REPLAY" not in os.environ:
    while not Path(f"may-join-{os.environ['ATOLL_LEARNER'].rpartition('-')[2]}").exists():
        time.sleep(0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
placement = "device" if options.device and os.environ["ATOLL_LEARNER"] == "learner-1" else None
with atoll.Learner(model, optimizer, placement=placement, join_wait_s=3600) as learner:
    number = int(learner.name.rpartition("-")[2])
    draws = np.random.default_rng(1 + number)
    while not learner.done:
        gradients = [torch.from_numpy(draws.integers(-8, 9, shape).astype(np.float32) / 64) for shape in SHAPES]
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=8 * (1 + number))
        if number == 1 and options.leave_after == learner.steps:
            break
if options.layout == "fsdp":
    dist.destroy_process_group()
