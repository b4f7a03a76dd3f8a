"""The inner optimizers: every parameter is in one, the learning rate reaches all, their state is kept and given."""

from __future__ import annotations

import pytest
import torch
from tests.learner.same import capture, same
from torch.optim import Optimizer

from atoll.learner.peer_state_checks import take_peer_state
from atoll.learner.snapshot import decode, encode
from atoll.learner.state import restore
from atoll.protocol.errors import ConfigError
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.training import build_model, build_optimizers, learning_rate, set_learning_rate

ADAMW = WorkloadSettings(depth=2, block=16)
MUON = WorkloadSettings(depth=2, block=16, optimizer="muon")


class Training:
    def __init__(self, seed: int, steps: int = 0) -> None:
        self.model = build_model(MUON, seed)
        self.optimizers = build_optimizers(self.model, MUON)
        self.train(steps)

    def train(self, steps: int) -> None:
        for step in range(steps):
            set_learning_rate(self.optimizers, step / 10, MUON)
            self.model((torch.arange(34) * (step + 3) % 251).view(2, 17)).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MUON.clip)
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def everything(self) -> list[object]:
        return [self.model.state_dict(), *(one.state_dict() for one in self.optimizers.values())]


def trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("settings", [ADAMW, MUON], ids=["adamw", "muon"])
def test_every_parameter_is_in_one_optimizer_and_in_one_group(settings: WorkloadSettings) -> None:
    model = build_model(settings, seed=0)
    held = [id(p) for optimizer in build_optimizers(model, settings).values() for p in trained(optimizer)]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = build_model(MUON, seed=0)
    muon, adamw = build_optimizers(model, MUON).values()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (type(muon).__name__, type(adamw).__name__) == ("Muon", "AdamW")
    assert [names[id(p)] for p in trained(muon)] == [
        f"blocks.{block}.{layer}.weight" for block in range(2) for layer in ("qkv", "mix", "up", "down")
    ]
    matrices, vectors = (group["params"] for group in adamw.param_groups)
    assert [names[id(p)] for p in matrices] == ["embedding.weight"] and all(p.ndim == 1 for p in vectors)
    decays = [group["weight_decay"] for one in (muon, adamw) for group in one.param_groups]
    assert decays == [MUON.weight_decay, MUON.weight_decay, 0.0]


def test_the_default_is_adamw_for_everything() -> None:
    assert list(build_optimizers(build_model(ADAMW, seed=0), ADAMW)) == ["adamw"]


def test_the_learning_rate_reaches_every_group_of_both() -> None:
    optimizers = build_optimizers(build_model(MUON, seed=0), MUON)
    expected = learning_rate(0.5, MUON.lr, MUON.warmup, MUON.floor)
    assert set_learning_rate(optimizers, 0.5, MUON) == expected != MUON.lr
    assert [group["lr"] for one in optimizers.values() for group in one.param_groups] == [expected] * 3


def test_a_cut_of_both_goes_on_bit_for_bit() -> None:
    first, second = Training(seed=1, steps=4), Training(seed=2, steps=1)
    header, parts = encode(capture(first.model, first.optimizers))
    restore(second.model, second.optimizers, None, decode(b"".join([header, *parts])))
    for training in (first, second):
        training.train(4)
    assert same(second.everything(), first.everything())


def test_a_newcomer_takes_both_states_from_a_peer() -> None:
    peer, newcomer = Training(seed=1, steps=4), Training(seed=1)
    given = capture(peer.model, peer.optimizers, parameters=False, rng=False)
    take_peer_state(newcomer.model, newcomer.optimizers, {}, given)
    for name, optimizer in newcomer.optimizers.items():
        assert same(optimizer.state_dict()["state"], peer.optimizers[name].state_dict()["state"]), name
    hidden = trained(newcomer.optimizers["muon"])
    assert all(newcomer.optimizers["muon"].state[p].keys() == {"momentum_buffer"} for p in hidden)


def test_a_torch_without_muon_is_told_which_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    assert build_optimizers(build_model(ADAMW, seed=0), ADAMW).keys() == {"adamw"}
    with pytest.raises(ConfigError, match=rf"torch has since 2\.9 and this is torch {torch.__version__[:3]}"):
        build_optimizers(build_model(MUON, seed=0), MUON)
