from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from atoll.learner.model import describe, load_weights, merged, trained
from atoll.protocol.errors import ConfigError, PlanError
from atoll.protocol.messages import TensorSpec


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(parameter))
    return model


def refusal(model: nn.Module) -> str:
    with pytest.raises(PlanError) as caught:
        trained(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tied_weights_are_one_tensor_and_an_embedding_wherever_else_they_are_used() -> None:
    assert describe(Tied()) == (
        TensorSpec("embedding.weight", (10, 4), "float32", embedding=True),
        TensorSpec("norm.weight", (4,), "float32"),
        TensorSpec("norm.bias", (4,), "float32"),
    )


def test_bags_of_embeddings_are_embeddings_and_linears_are_not() -> None:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(5, 2), "linear": nn.Linear(5, 2, bias=False)})
    assert [(spec.name, spec.embedding) for spec in describe(model)] == [("bag.weight", True), ("linear.weight", False)]


def test_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(trained(model)) == ["1.weight", "1.bias"]


def test_a_frozen_parameter_may_be_of_any_kind() -> None:
    model = with_parameter(torch.zeros(2))
    model.register_parameter("scale", nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False))
    assert list(trained(model)) == ["weight"]


def test_mixed_dtypes_are_named_each() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16())
    model.append(nn.Linear(2, 2, bias=False).half())
    assert [spec.dtype for spec in describe(model)] == ["float32", "bfloat16", "float16"]


def test_plain_buffers_do_no_harm() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(2))
    assert list(trained(model)) == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    text = refusal(with_parameter(torch.zeros(2, dtype=dtype)))
    assert "'weight'" in text and str(dtype).removeprefix("torch.") in text
    assert "use float32, bfloat16 or float16" in text


def test_an_empty_parameter_is_refused() -> None:
    assert "'weight' is empty" in refusal(with_parameter(torch.zeros(0, 3)))


def test_a_meta_parameter_is_refused() -> None:
    text = refusal(nn.Linear(2, 2, device="meta"))
    assert "'weight'" in text and "materialise" in text


def test_a_lazy_parameter_is_refused() -> None:
    text = refusal(nn.LazyLinear(2))
    assert "'weight'" in text and "run one batch" in text


def test_a_sparse_parameter_is_refused() -> None:
    assert "'weight' is sparse" in refusal(with_parameter(torch.eye(3).to_sparse()))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_running_statistics_take_part_and_other_buffers_by_choice(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3), norm)
    model.register_buffer("codes", torch.ones(2))
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    statistics = ["buffers/mean/1.running_mean", "buffers/mean/1.running_var"]
    assert [spec.name for spec in describe(model) if spec.buffer_rule] == statistics
    chosen = [spec.name for spec in describe(model, "first") if spec.buffer_rule]
    assert chosen == ["buffers/first/codes", "buffers/first/1.running_mean", "buffers/first/1.running_var"]
    assert not [spec.name for spec in describe(model, "local") if spec.buffer_rule]
    assert [*merged(model, "first")] == [spec.name for spec in describe(model, "first")]


def test_a_mask_of_infinities_is_not_merged() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    describe(model)
    with pytest.raises(PlanError, match=r"buffer 'mask' holds values that are not finite.*persistent=False"):
        describe(model, "mean")


def test_batch_norm_without_running_statistics_is_fine() -> None:
    assert list(trained(nn.BatchNorm1d(3, track_running_stats=False))) == ["weight", "bias"]


def test_a_model_on_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:1")

    model = nn.Linear(2, 2)
    model.register_parameter("far", Elsewhere(torch.zeros(2)))
    text = refusal(model)
    assert "cpu, cuda:1" in text and "model.to(device)" in text


def test_a_model_without_trained_parameters_is_refused() -> None:
    assert "no trained parameters" in refusal(nn.Linear(2, 2).requires_grad_(False))
    assert "no trained parameters" in refusal(nn.Tanh())


def test_pretrained_weights_are_loaded_by_name_and_into_the_parameters_own_type(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    save_file(
        {"weight": torch.tensor([[1.5, -2.0]]), "bias": torch.tensor([3.0]), "more": torch.ones(1)}, tmp_path / "w"
    )
    load_weights(model, tmp_path / "w")
    assert model.weight.tolist() == [[1.5, -2.0]] and model.bias.tolist() == [3.0]


def test_pretrained_weights_of_another_model_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    model, file = nn.Linear(2, 1), tmp_path / "w"
    with pytest.raises(ConfigError, match="cannot read the weights to begin with"):
        load_weights(model, file)
    save_file({"weight": torch.ones(1, 2)}, file)
    with pytest.raises(ConfigError, match="holds no weights for 'bias'"):
        load_weights(model, file)
    save_file({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, file)
    with pytest.raises(ConfigError, match=r"'weight' is \(1, 2\) here, \(1, 3\) in the file"):
        load_weights(model, file)
