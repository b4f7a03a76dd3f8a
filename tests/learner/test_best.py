"""The model with the best score is kept when it is scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.learner.evaluator import BestModel, DecidingFigure, FetchedModel, deciding_figure
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.store.rundir import read_model_facts

PLAN = make_plan((TensorSpec("a", (2, 2), "float32"), TensorSpec("b", (3,), "bfloat16")), 2)


def fetched(value: float, round: int, run: str = "r") -> FetchedModel:
    values = [np.full(part.size, value, dtype=np.float32) for part in PLAN.fragments]
    return FetchedModel(run, round, PLAN, values, [round, round + 1])


def loss(value: float) -> DecidingFigure:
    return DecidingFigure("loss", value, "min")


def test_only_a_better_one_takes_its_place(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "run" / "model-best.safetensors")
    assert best.keep(loss(2.0), fetched(1.0, 10))
    assert not best.keep(loss(2.0), fetched(2.0, 20)) and not best.keep(loss(3.0), fetched(3.0, 30))
    assert best.keep(loss(1.5), fetched(4.0, 40))
    facts = read_model_facts(best.path)
    assert facts == {"format": "pt", "run": "r", "round": "40", "versions": "40,41", "figure": "loss", "score": "1.5"}
    tensors = load_file(best.path)
    assert tensors["a"].shape == (2, 2) and set(tensors) == {"a", "b"}
    assert all(array.dtype == np.float32 and (array == 4.0).all() for array in tensors.values())


def test_an_evaluator_that_was_started_again_goes_on_from_what_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "model-best.safetensors"
    BestModel(path).keep(loss(2.0), fetched(1.0, 10))
    assert not BestModel(path).keep(loss(2.5), fetched(2.0, 20))
    assert BestModel(path).keep(DecidingFigure("accuracy", 0.1, "max"), fetched(3.0, 30))


def test_the_best_of_another_run_is_kept_under_its_name(tmp_path: Path) -> None:
    """After a restore by take-over a worse model of the new run took its place."""
    path = tmp_path / "model-best.safetensors"
    BestModel(path).keep(loss(1.352), fetched(1.0, 10, run="first"))
    assert BestModel(path).keep(loss(1.88), fetched(2.0, 20, run="restored"))
    BestModel(path).keep(loss(3.0), fetched(3.0, 30, run="first"))
    BestModel(path).keep(loss(4.0), fetched(4.0, 40, run="third"))
    scores = {file.name: read_model_facts(file)["score"] for file in tmp_path.iterdir()}
    assert scores == {
        "model-best-of-first.safetensors": "1.352",
        "model-best-of-restored.safetensors": "1.88",
        "model-best-of-first-2.safetensors": "3.0",
        "model-best.safetensors": "4.0",
    }


def test_a_disk_that_fails_costs_the_file_and_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    best = BestModel(tmp_path / "file" / "model-best.safetensors")
    assert not best.keep(loss(2.0), fetched(1.0, 10)) and not best.keep(loss(1.0), fetched(1.0, 20))
    assert capsys.readouterr().err.count("the best model is not kept") == 1


def test_the_loss_decides_and_without_one_the_first_declared_metric() -> None:
    metrics = {"recall": None, "accuracy": 0.9, "depth": 3.0}
    assert deciding_figure(0.5, metrics, {"accuracy": "max"}) == loss(0.5)
    assert deciding_figure(None, metrics, {"recall": "max", "accuracy": "max"}) == DecidingFigure(
        "accuracy", 0.9, "max"
    )
    assert deciding_figure(None, metrics, {}) is None
    assert DecidingFigure("accuracy", 0.9, "max").is_better(0.8) and not loss(0.9).is_better(0.8)


def test_merged_buffers_have_the_names_that_the_model_gives_them(tmp_path: Path) -> None:
    tensors = (TensorSpec("weight", (2,), "float32"), TensorSpec("buffers/mean/norm.running_mean", (2,), "float32"))
    plan = make_plan(tensors, 1)
    best = BestModel(tmp_path / "model-best.safetensors")
    assert best.keep(loss(1.0), FetchedModel("r", 1, plan, [np.ones(plan.fragments[0].size, np.float32)], [1]))
    assert set(load_file(best.path)) == {"weight", "norm.running_mean"}


def test_split_tensors_are_whole_again(tmp_path: Path) -> None:
    plan = make_plan((TensorSpec("a", (5, 2), "float32"), TensorSpec("b", (), "float32")), 3)
    assert sum(len(part.pieces) for part in plan.fragments) > 2
    values = [np.full(part.size, part.index, np.float32) for part in plan.fragments]
    best = BestModel(tmp_path / "model-best.safetensors")
    assert best.keep(loss(1.0), FetchedModel("r", 1, plan, values, [1, 1, 1]))
    held = load_file(best.path)
    assert held["a"].shape == (5, 2) and held["b"].shape == ()
    assert sorted(set(held["a"].ravel().tolist())) == [0.0, 1.0, 2.0]
