from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.learner.same import same
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from atoll.learner.state import check_optimizer_state, load_optimizer_state, optimizer_state
from atoll.protocol.errors import ConfigError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def grouped(model: nn.Module, **options: Any) -> AdamW:
    """Weights decay, biases do not: two groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], **options)


def step(model: nn.Module, optimizer: Optimizer, times: int = 3) -> None:
    for number in range(times):
        dtype = next(model.parameters()).dtype
        model(torch.full((2, 4), 0.1 * number, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def refusal(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_optimizer_state(optimizer, model, saved, "optimizer")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_state_goes_by_the_names_of_the_parameters() -> None:
    model = net()
    optimizer = grouped(model)
    step(model, optimizer)
    saved = optimizer_state(optimizer, model)
    assert [list(group) for group in saved["parameters"]] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert saved["state"].keys() == {"0.weight", "2.weight", "0.bias", "2.bias"}
    assert saved["state"]["2.bias"]["exp_avg"] is optimizer.state[model[2].bias]["exp_avg"]
    assert [options["weight_decay"] for options in saved["options"]] == [0.01, 0.0]


def test_another_order_of_the_parameters_takes_each_its_own_state() -> None:
    model, other = net(), net(1)
    optimizer = AdamW(model.parameters())
    turned = AdamW(list(reversed(list(other.parameters()))), lr=9.0)
    step(model, optimizer)
    check_optimizer_state(turned, other, optimizer_state(optimizer, model), "optimizer")
    load_optimizer_state(turned, other, optimizer_state(optimizer, model))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert same(dict(turned.state[its]), dict(optimizer.state[mine]))
    assert turned.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [id(p) for p in turned.param_groups[0]["params"]] == [id(p) for p in reversed(list(other.parameters()))]


def test_names_given_to_the_optimizer_stay_its_own() -> None:
    model, other = net(), net(1)
    optimizer, turned = AdamW(model.named_parameters()), AdamW(list(reversed(list(other.named_parameters()))))
    step(model, optimizer)
    load_optimizer_state(turned, other, optimizer_state(optimizer, model))
    assert turned.param_groups[0]["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    nameless = AdamW(list(reversed(list(other.parameters()))))
    load_optimizer_state(nameless, other, optimizer_state(optimizer, model))
    assert "param_names" not in nameless.param_groups[0]


def test_a_parameter_outside_of_the_model_means_positions_for_all() -> None:
    model, alone = net(), nn.Parameter(torch.ones(2))
    optimizer = SGD([*model.parameters(), alone], momentum=0.9)
    step(model, optimizer)
    saved = optimizer_state(optimizer, model)
    assert list(saved["parameters"][0]) == [0, 1, 2, 3, 4] and list(saved["state"]) == [0, 1, 2, 3]
    other = net(1)
    fresh = SGD([*other.parameters(), nn.Parameter(torch.ones(2))], momentum=0.9)
    check_optimizer_state(fresh, other, saved, "optimizer")
    load_optimizer_state(fresh, other, saved)
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", [NAdam, AdamW])
def test_state_wider_than_its_parameter_is_not_rounded(kind: type[Optimizer]) -> None:
    """NAdam keeps a product in fp32, which torch's own loading would round to bf16; here AdamW keeps all of it so."""
    model, other = net().bfloat16(), net(1).bfloat16()
    optimizer, fresh = kind(model.parameters()), kind(other.parameters())  # type: ignore[call-arg]
    step(model, optimizer)
    if kind is AdamW:
        for state in optimizer.state.values():
            state["exp_avg_sq"] = torch.rand(state["exp_avg_sq"].shape)
    load_optimizer_state(fresh, other, optimizer_state(optimizer, model))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_odd_state_is_left_as_it_was() -> None:
    model, other = net(), net(1)
    optimizer, fresh = SGD(model.parameters()), SGD(other.parameters())
    optimizer.state[model[0].weight] = {
        "text": "torch would take it for a list",
        "nest": [{"double": torch.rand(2, dtype=torch.float64)}, (torch.tensor(3), None)],
    }
    optimizer.state["of no parameter"] = {"steps": 7}  # type: ignore[index]
    load_optimizer_state(fresh, other, optimizer_state(optimizer, model))
    assert same(dict(fresh.state[other[0].weight]), optimizer.state[model[0].weight])
    assert fresh.state["of no parameter"] == {"steps": 7}  # type: ignore[index]


def test_further_entries_of_a_state_dict_pass_through() -> None:
    class Counting(SGD):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict.pop("count")
            super().load_state_dict(state_dict)

    model, other = net(), net(1)
    optimizer, fresh = Counting(model.parameters()), Counting(other.parameters())
    optimizer.count = 5
    load_optimizer_state(fresh, other, optimizer_state(optimizer, model))
    assert fresh.count == 5


def test_what_this_optimizer_had_before_is_gone() -> None:
    model, other = net(), net(1)
    optimizer, used = AdamW(model.parameters()), AdamW(other.parameters())
    step(other, used)
    load_optimizer_state(used, other, optimizer_state(optimizer, model))
    assert not used.state


def test_the_first_difference_is_named() -> None:
    model, other = net(), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5))
    saved = optimizer_state(AdamW(model.parameters()), model)
    another = "the snapshot is of another optimizer: 'optimizer'"
    assert refusal(SGD(model.parameters()), model, saved) == f"{another} is SGD here, AdamW in the snapshot"
    assert refusal(grouped(model), model, saved) == f"{another} has 2 groups of parameters here, 1 in the snapshot"
    assert refusal(AdamW(other.parameters()), other, saved) == (
        f"{another}, group 0: parameter '2.weight' is (5, 3) float32 here, (2, 3) float32 in the snapshot"
    )
    assert "parameter '2.bias' is in the snapshot, not here" in refusal(
        AdamW(list(model.parameters())[:3]), model, saved
    )
    shorter = optimizer_state(AdamW(list(model.parameters())[:3]), model)
    assert "parameter '2.bias' is here, not in the snapshot" in refusal(AdamW(model.parameters()), model, shorter)


def test_another_type_of_a_parameter_is_a_difference() -> None:
    model, half = net(), net().bfloat16()
    text = refusal(AdamW(half.parameters()), half, optimizer_state(AdamW(model.parameters()), model))
    assert "'0.weight' is (3, 4) bfloat16 here, (3, 4) float32 in the snapshot" in text


def test_names_do_not_fit_positions() -> None:
    model, other = net(), net()
    saved = optimizer_state(AdamW(model.parameters()), model)
    assert "parameter 0 is here, not in the snapshot" in refusal(AdamW(other.parameters()), model, saved)
