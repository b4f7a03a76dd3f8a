"""One rank of a gloo all-reduce of ring.py's gradients: `python gloo_sum.py RANK RANKS ELEMENTS PORT`.

Rank 0 prints the first values of the sum.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from ring import make_gradients


def main() -> None:
    rank, ranks, elements, port = (int(word) for word in sys.argv[1:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    gradients = torch.from_numpy(make_gradients(rank, elements))
    dist.all_reduce(gradients)
    if rank == 0:
        print(json.dumps(gradients[:1000].tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
