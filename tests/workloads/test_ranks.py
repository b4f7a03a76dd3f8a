"""The built-in GPT dealt out to ranks; here in a group of one, tests/system has real ones.

DTensors are imported where they are used: every worker collects this file, and to load them takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from atoll.workloads import ranks
from atoll.workloads.ranks import join_ranks, spread_model
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.training import build_model, build_optimizers

CPU = torch.device("cpu")


@contextmanager
def a_group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(parallel: str, optimizer: str = "adamw") -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Three steps as the built-in script makes them; the model as it was spread, and its tensors after them."""
    from torch.distributed.tensor import DTensor

    settings = WorkloadSettings(depth=1, block=16, parallel=parallel, optimizer=optimizer)
    gpt = build_model(settings, seed=1)
    model = spread_model(gpt, CPU, parallel)
    optimizers = build_optimizers(gpt, settings)
    for step in range(3):
        model(torch.arange(34).view(2, 17) + step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for one in optimizers.values():
            one.step()
            one.zero_grad()
    return model, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_model_that_is_spread_trains_as_a_whole_one_does(optimizer: str) -> None:
    from torch.distributed.tensor import DTensor

    plain, wanted = train("fsdp", optimizer)
    assert type(plain).__name__ == "Gpt", "without a group it stays as it is"
    with a_group_of_one():
        sharded, found = train("fsdp", optimizer)
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        copied, found = train("ddp", optimizer)
        assert isinstance(copied, torch.nn.parallel.DistributedDataParallel)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_one_rank_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_ranks():
        assert not dist.is_initialized()


def test_ranks_train_on_the_cpu_where_not_each_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(ranks._choose_device(1, 2)) == "cuda:1" and str(ranks._choose_device(1, 4)) == "cpu"
