"""A rank's state travels and is kept bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.protocol.errors import ConfigError
from atoll.workloads.elastic import TrainedState
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.training import build_model, build_optimizer

SMALL = WorkloadSettings(depth=1, block=16)


class Maker:
    def __init__(self, seed: int, settings: WorkloadSettings = SMALL) -> None:
        self.model = build_model(settings, seed)
        self.optimizer = build_optimizer(self.model, settings)
        self.trained = TrainedState(self.model, self.optimizer)

    def train(self) -> None:
        batch = torch.arange(17).repeat(2, 1)
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()


def test_who_takes_a_state_goes_on_exactly_like_the_one_it_came_from() -> None:
    old, new = Maker(0), Maker(1)
    old.train()
    new.trained.load_flat(old.trained.flatten())
    assert new.trained.digest() == old.trained.digest()
    old.train()
    assert new.trained.digest() != old.trained.digest()
    new.train()
    assert new.trained.digest() == old.trained.digest()


def test_a_state_made_before_the_first_step_changes_nothing() -> None:
    made, bare = Maker(0), build_model(SMALL, 0)
    optimizer = build_optimizer(bare, SMALL)
    made.train()
    bare(torch.arange(17).repeat(2, 1)).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), bare.parameters(), strict=True))


def test_a_checkpoint_brings_state_and_step_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    old, new = Maker(0), Maker(1)
    assert new.trained.load(path) == 0
    old.train()
    old.trained.save(path, 7)
    assert new.trained.load(path) == 7
    assert new.trained.digest() == old.trained.digest()


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    Maker(0, WorkloadSettings(depth=2, block=16)).trained.save(path, 1)
    with pytest.raises(ConfigError, match="is the checkpoint of another model"):
        Maker(0).trained.load(path)
