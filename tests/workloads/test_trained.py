"""A rank's state travels and is kept bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.protocol.errors import ConfigError
from atoll.workloads.elastic import TrainedState
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.training import build_model, build_optimizers

SMALL = WorkloadSettings(depth=1, block=16)
MUON = WorkloadSettings(depth=1, block=16, optimizer="muon")
both = pytest.mark.parametrize("settings", [SMALL, MUON], ids=["adamw", "muon"])


class Maker:
    def __init__(self, seed: int, settings: WorkloadSettings = SMALL) -> None:
        self.model = build_model(settings, seed)
        self.optimizers = build_optimizers(self.model, settings)
        self.trained = TrainedState(self.model, self.optimizers)

    def train(self) -> None:
        batch = torch.arange(17).repeat(2, 1)
        self.model.zero_grad()
        self.model(batch).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()


@both
def test_who_takes_a_state_goes_on_exactly_like_the_one_it_came_from(settings: WorkloadSettings) -> None:
    old, new = Maker(0, settings), Maker(1, settings)
    old.train()
    new.trained.load_flat(old.trained.flatten())
    assert new.trained.digest() == old.trained.digest()
    old.train()
    assert new.trained.digest() != old.trained.digest()
    new.train()
    assert new.trained.digest() == old.trained.digest()


@both
def test_a_state_made_before_the_first_step_changes_nothing(settings: WorkloadSettings) -> None:
    made, bare = Maker(0, settings), build_model(settings, 0)
    made.train()
    bare(torch.arange(17).repeat(2, 1)).backward()
    for optimizer in build_optimizers(bare, settings).values():
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), bare.parameters(), strict=True))


@both
def test_a_checkpoint_brings_state_and_step_back(tmp_path: Path, settings: WorkloadSettings) -> None:
    path = tmp_path / "checkpoint.safetensors"
    old, new = Maker(0, settings), Maker(1, settings)
    assert new.trained.load(path) == 0
    old.train()
    old.trained.save(path, 7)
    assert new.trained.load(path) == 7
    assert new.trained.digest() == old.trained.digest()


@pytest.mark.parametrize("other", [WorkloadSettings(depth=2, block=16), MUON], ids=["model", "optimizer"])
def test_the_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path, other: WorkloadSettings) -> None:
    path = tmp_path / "checkpoint.safetensors"
    Maker(0, other).trained.save(path, 1)
    with pytest.raises(ConfigError, match="is the checkpoint of another model or optimizer"):
        Maker(0).trained.load(path)
