"""A rank of a group without a run. On its own: its process would load all that test_ranks.py imports, 2 s of torch."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import torch
import torch.distributed as dist

from atoll.learner.learner import Learner


def draw_alone(rank: int, store: str) -> tuple[list[int], str]:
    """The samples that a rank of a group without a run trains on, and what it says."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    told = io.StringIO()
    with redirect_stderr(told), Learner(torch.nn.Linear(3, 2)) as learner:
        seen = [int(one) for batch in learner.batches(torch.arange(24), batch_size=4) for one in batch]
    dist.destroy_process_group()
    return seen, told.getvalue()
