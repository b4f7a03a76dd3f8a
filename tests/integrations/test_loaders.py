"""Leased samples under the dataloaders of others, and schedules that are as far as the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import atoll
from atoll.integrations.loaders import follow_run, lease_samples

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loader_gives_every_sample_of_the_pass_once(prepared: bool) -> None:
    datasets, accelerate = pytest.importorskip("datasets"), pytest.importorskip("accelerate")
    data = datasets.Dataset.from_dict({"x": list(range(20))}).with_format("torch")
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)
    if prepared:
        loader = accelerate.Accelerator(cpu=True).prepare(loader)
    model = nn.Linear(1, 1)
    with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
        assert lease_samples(loader, learner)
        assert len(loader) == 5
        batches = [batch["x"].tolist() for batch in loader]
    assert sorted(sample for batch in batches for sample in batch) == list(range(20)) and all(
        len(batch) == 4 for batch in batches
    )


def test_a_stream_stays_as_it_is() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    model = nn.Linear(1, 1)
    with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
        loader: Any = DataLoader(Stream(), batch_size=4)
        assert not lease_samples(loader, learner)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


DATA = torch.arange(12)


@pytest.mark.parametrize(
    ("sampler", "leased"),
    [
        (RandomSampler(DATA), True),  # type: ignore[arg-type]
        (SequentialSampler(DATA), True),  # type: ignore[arg-type]
        (DistributedSampler(DATA, 1, 0), True),  # type: ignore[arg-type]
        (RandomSampler(DATA, replacement=True), False),  # type: ignore[arg-type]
        (WeightedRandomSampler([1.0] * 6 + [0.0] * 6, 12), False),
        ([0, 0, 1, 1], False),
    ],
)
def test_leases_replace_only_a_sampler_that_takes_every_sample(
    sampler: Any, leased: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1, 1)
    with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
        loader: Any = DataLoader(DATA, batch_size=4, sampler=sampler)
        assert lease_samples(loader, learner) is leased
        seen = [int(sample) for batch in loader for sample in batch]
    assert (sorted(seen) == DATA.tolist()) is leased
    said = capsys.readouterr().err
    assert ("chooses the samples and stays" in said) is not leased
    assert ("make it from learner.seed" in said) is (sampler == [0, 0, 1, 1])


@dataclass
class RunAt:
    progress: float


def test_a_schedule_is_as_far_as_the_run() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = pytest.importorskip("transformers").get_scheduler(
        "linear", optimizer, num_warmup_steps=10, num_training_steps=100
    )
    run = RunAt(0.05)
    assert follow_run(schedule, run, 100)  # type: ignore[arg-type]
    rates = [schedule.get_last_lr()[0]]
    for run.progress in (0.1, 0.55, 1.0):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert not follow_run(torch.optim.lr_scheduler.StepLR(optimizer, 10), run, 100)  # type: ignore[arg-type]
