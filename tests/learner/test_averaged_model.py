"""The moving average of the scored models: its formula, what stays out of it, and how a new evaluator goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.learner.averaged_model import AveragedModel
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.store.rundir import read_model_facts

SPECS = (TensorSpec("weight", (2, 2), "float32"), TensorSpec("buffers/mean/running", (2,), "float32"))
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
        assert (average.tensors["running"] == value).all(), "a buffer is that of the newest"


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
