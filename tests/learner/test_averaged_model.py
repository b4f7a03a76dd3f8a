"""The moving average of the scored models: its formula, what stays out of it, and how a new evaluator goes on."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.learner.averaged_model import AveragedModel
from atoll.learner.model import describe, merged
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.store.rundir import read_model_facts

SPECS = (
    TensorSpec("weight", (2, 2), "float32"),
    TensorSpec("buffers/mean/running", (2,), "float32"),
    TensorSpec("buffers/first/table", (2,), "float32"),
)
PLAN = make_plan(SPECS, 2)


def model(value: float) -> dict[str, FloatArray]:
    return {spec.name_in_model: np.full(spec.shape, value, dtype=np.float32) for spec in SPECS}


def add(average: AveragedModel, value: float, version: int, least: tuple[int, ...] = (), run: str = "r") -> None:
    average.add(run, PLAN, (version, version), model(value), least)


def test_it_is_a_plain_mean_until_the_decay_is_less() -> None:
    average, expected = AveragedModel(0.75), [3.0, 4.0, 5.0, 5.0, 7.5]
    for version, (value, due) in enumerate(zip([3.0, 5.0, 7.0, 5.0, 15.0], expected, strict=True), 1):
        add(average, value, version)
        assert average.tensors["weight"] == pytest.approx(np.full((2, 2), due)), f"with {version} models"
        assert average.tensors["running"] == pytest.approx(np.full(2, due)), "running statistics go with the weights"
        assert (average.tensors["table"] == value).all(), "a buffer that is taken from one learner is the newest"


def test_what_nobody_trained_and_what_was_given_up_stay_out() -> None:
    average = AveragedModel(0.9)
    average.add("r", PLAN, (1, 0), model(9.0))
    assert average.models == 0
    add(average, 2.0, 4)
    add(average, 4.0, 5)
    add(average, 100.0, 5)
    assert (average.tensors["weight"] == 3.0).all(), "the same versions count once"
    add(average, 7.0, 7, least=(6, 6))
    assert average.models == 1 and (average.tensors["weight"] == 7.0).all(), "the run was rolled back"


def test_the_next_evaluator_of_the_run_goes_on_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, values = tmp_path / "run" / "model-ema.safetensors", np.random.default_rng(0).standard_normal(9)
    straight, stopped = AveragedModel(0.6), AveragedModel(0.6, path)
    for version, value in enumerate(values, 1):
        add(straight, value, version)
        if version % 3 == 0:
            stopped = AveragedModel(0.6, path)
            add(stopped, values[version - 2], version - 1)  # it died before it sent this score
        add(stopped, value, version)
        stopped.save(10 * version)
    assert all((straight.tensors[name] == stopped.tensors[name]).all() for name in straight.tensors)
    facts = read_model_facts(path)
    assert facts == {"format": "pt", "run": "r", "round": "90", "versions": "9,9", "decay": "0.6", "models": "9"}
    other = AveragedModel(0.5, path)
    add(other, 1.0, 10)
    assert other.models == 1 and "the average begins anew: its decay was 0.6" in capsys.readouterr().err
    another = AveragedModel(0.6, path)
    add(another, 1.0, 10, run="another")
    assert another.models == 1


def test_the_average_of_a_model_with_batchnorm_scores_as_with_statistics_made_for_it() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2048, 8) * 3 + 1
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    train, held_out = slice(0, 1536), slice(1536, 2048)
    layers = [nn.Sequential(nn.Linear(wide, 32), nn.BatchNorm1d(32), nn.ReLU()) for wide in (8, 32, 32)]
    net = nn.Sequential(*layers, nn.Linear(32, 2))
    optimizer, plan = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), make_plan(describe(net), 2)
    average = AveragedModel(0.9)
    for step in range(1, 121):
        batch = torch.randint(0, train.stop, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        if step % 10 == 0:
            specs = {spec.name: spec.name_in_model for spec in plan.tensors}
            tensors = {specs[name]: tensor.detach().numpy().copy() for name, tensor in merged(net).items()}
            average.add("r", plan, (step, step), tensors)

    def score(state: dict[str, torch.Tensor], *, anew: bool = False) -> float:
        model = copy.deepcopy(net)
        model.load_state_dict(state)
        if anew:
            torch.optim.swa_utils.update_bn([inputs[train]], model)
        model.eval()
        with torch.no_grad():
            return nn.functional.cross_entropy(model(inputs[held_out]), labels[held_out]).item()

    state = net.state_dict()
    averaged = {**state, **{name: torch.from_numpy(tensor) for name, tensor in average.tensors.items()}}
    newest = {name: tensor for name, tensor in state.items() if "running" in name}
    loss, plain = score(averaged), score(state)
    assert loss < plain < score({**averaged, **newest}), "beside the newest statistics it would be worse than the model"
    assert loss == pytest.approx(score(averaged, anew=True), rel=0.15)
