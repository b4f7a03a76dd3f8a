"""Names of tensors, whatever the model is wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.learner.same import capture, same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from atoll.learner.model import describe, load_weights, named_parameters, strip_wrappers, trained
from atoll.learner.state import restore

BARE = ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]


def make_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 2)))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


def compiled_inside(model: nn.Module) -> nn.Module:
    model._modules["2"] = compiled(model._modules["2"])  # type: ignore[arg-type]
    return model


def checkpointed_inside(model: nn.Module) -> nn.Module:
    model._modules["0"] = checkpoint_wrapper(model._modules["0"])
    return model


WRAPS = [
    compiled,
    compiled_inside,
    checkpointed_inside,
    nn.DataParallel,
    AveragedModel,
    lambda model: compiled(nn.DataParallel(compiled_inside(model))),
]


def wrapped_as(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return wrap(make_model())


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_has_the_plan_of_the_bare_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrapped_as(wrap)
    assert [name for name, _ in model.named_parameters()] != BARE, "torch's own names have the wrapper in them"
    assert [name for name, _ in named_parameters(model)] == BARE
    assert describe(model) == describe(make_model())


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_a_wrapped_model_saves_loads_into_the_bare_one_and_back(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model, bare, file = wrapped_as(wrap), make_model(seed=1), tmp_path / "model.safetensors"
    save_file({name: parameter.data for name, parameter in trained(model).items()}, file)
    bare.load_state_dict(load_file(file))
    assert torch.equal(bare[0].weight, trained(model)["0.weight"])
    save_file(bare.state_dict(), file)
    load_weights(model, file)


def test_a_model_that_has_a_module_of_that_name_keeps_it() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert list(trained(Own())) == ["module.weight", "module.bias"]
    assert list(trained(nn.DataParallel(Own()))) == ["module.weight", "module.bias"]


def make_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_the_state_of_a_compiled_learner_goes_into_a_plain_one() -> None:
    one, other = compiled(make_model()), make_model(seed=1)
    mine, its = make_state(one), torch.optim.AdamW(other.parameters())
    restore(other, its, None, capture(one, mine), rng=False)
    assert same(mine.state_dict()["state"], its.state_dict()["state"])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_buffers_go_by_their_bare_names_too() -> None:
    model = make_model()
    model[2].register_buffer("scale", torch.ones(2))
    assert "buffers/2.scale" in capture(compiled_inside(model), rng=False).tensors


def test_weights_to_begin_with_may_come_from_a_compiled_model(tmp_path: Path) -> None:
    model, file = make_model(), tmp_path / "compiled.safetensors"
    save_file(compiled(make_model(seed=1)).state_dict(), file)
    load_weights(model, file)
    assert torch.equal(model[0].weight, make_model(seed=1)[0].weight)


def test_a_checkpoint_of_a_wrapped_model_is_read_by_bare_names() -> None:
    assert strip_wrappers({"_orig_mod.module.0.weight": 1, "_orig_mod.module.2._orig_mod.bias": 2}) == {
        "0.weight": 1,
        "2.bias": 2,
    }
    assert strip_wrappers({"module.weight": 1, "head.weight": 2}) == {"module.weight": 1, "head.weight": 2}
    assert strip_wrappers({}) == {}
