"""Two processes over gloo: `python gloo.py ROWS ROUNDS HOW` prints what each all-reduce of one fp32 tensor took.

HOW: `all-reduce` is the bare collective; `ddp` is the backward pass of DistributedDataParallel, gradients averaged;
`alone` the same backward pass without the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 4096


class OneTensor(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(rows, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.w.sum()


def work(rank: int, rows: int, rounds: int, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(OneTensor(rows))
    tensor, found = torch.ones(rows, WIDTH), []
    for _ in range(rounds):
        tensor.fill_(1.0)
        model.zero_grad()
        with model.no_sync() if how == "alone" else nullcontext():
            loss = model()
            dist.barrier()
            began = time.monotonic()
            if how == "all-reduce":
                dist.all_reduce(tensor)
            else:
                loss.backward()
            ended = time.monotonic()
        assert how != "all-reduce" or float(tensor[0, 0]) == 2.0
        found.append({"began": began, "ended": ended, "held_s": ended - began, "longest_s": ended - began})
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    rows, rounds, how = sys.argv[1:4]
    if len(sys.argv) > 4:
        return work(int(sys.argv[4]), int(rows), int(rounds), how)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is this process's, for both of them
    command = [sys.executable, __file__, rows, rounds, how]
    both = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    print(json.dumps([json.loads(one.communicate()[0]) for one in both]))


if __name__ == "__main__":
    main()
