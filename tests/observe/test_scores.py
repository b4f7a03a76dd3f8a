from __future__ import annotations

from typing import Any

import pytest
from tests.observe.conftest import committed, member, said

from atoll.observe.story import WARNING, story
from atoll.observe.summary import best_score, read_scores, summarise, training_losses
from atoll.telemetry.events import Event


def scored(number: int, **fields: Any) -> Event:
    return said(float(number), "score", round=number, cpu_s=0.1, sample="", **fields)


def trained(number: int, *losses: float | None) -> Event:
    members = [member(f"learner-{i}", 1, number, 10, None) | {"loss": loss} for i, loss in enumerate(losses)]
    return committed(float(number), number, len(losses), *members)


def test_the_training_loss_is_the_mean_of_a_cycle_of_rounds() -> None:
    rounds = [trained(0, 4.0, 2.0), trained(1, 3.0), trained(2, 9.0), trained(3, 1.0, None), trained(4, 0.5)]
    assert training_losses(rounds, fragments=2) == {"training_loss_start": 3.0, "training_loss_end": 0.75}


def test_of_a_short_run_the_halves_are_compared() -> None:
    rounds = [trained(0, 4.0), trained(1, 3.0), trained(2, 2.0)]
    assert training_losses(rounds, fragments=24) == {"training_loss_start": 4.0, "training_loss_end": 2.0}


def test_without_a_loss_nothing_is_guessed() -> None:
    assert training_losses([], 2) == {"training_loss_start": None, "training_loss_end": None}
    assert training_losses([trained(0, None)], 2) == {"training_loss_start": None, "training_loss_end": None}
    assert read_scores([])["metrics"] == {} and read_scores([])["validation_loss_best"] is None


def test_metrics_have_a_start_an_end_and_where_declared_a_best() -> None:
    directions = {"accuracy": "max"}
    figures = [(0.2, 8.0), (0.9, 9.0), (0.8, 7.0)]
    scores = [
        scored(10 * i, loss=3.0 - i, metrics={"accuracy": accuracy, "depth": depth}, directions=directions)
        for i, (accuracy, depth) in enumerate(figures)
    ]
    found = read_scores(scores)
    assert found["metrics"] == {
        "accuracy": {"direction": "max", "start": 0.2, "end": 0.8, "best": 0.9, "best_round": 10},
        "depth": {"direction": None, "start": 8.0, "end": 7.0, "best": None, "best_round": None},
    }
    assert (found["validation_loss_best"], found["validation_loss_best_round"]) == (1.0, 20)


def test_what_is_not_finite_is_passed_over_and_the_unit_is_the_scripts_own() -> None:
    found = read_scores([scored(0, loss=None, metrics={"f1": None}, unit="bits"), scored(5, loss=2.0)])
    assert (found["validation_loss_start"], found["loss_unit"], found["metrics"]) == (2.0, "bits", {})


@pytest.mark.parametrize(("direction", "best"), [("min", (3, 1.0)), ("max", (1, 2.0)), (None, None)])
def test_of_equal_scores_the_first_is_the_best(direction: str | None, best: tuple[int, float] | None) -> None:
    assert best_score([(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)], direction) == best


def test_a_last_loss_that_is_not_finite_is_no_older_one() -> None:
    scores = [{"round": 2, "loss": 1.5}, {"round": 9, "loss": None, "not_finite": True}]
    found = read_scores(scores)
    assert found["validation_loss_start"] == found["validation_loss_best"] == 1.5
    assert found["validation_loss_end"] is None and found["validation_not_finite"] == 1
    assert read_scores(scores[1:])["validation_not_finite"] == 1
    alone = read_scores([{"round": 2, "loss": None, "metrics": {"accuracy": 0.5}}])
    assert alone["validation_loss_end"] is None and alone["validation_not_finite"] == 0, "metrics alone"


def test_a_last_score_of_an_earlier_model_is_told_with_its_round(events: list[Event]) -> None:
    assert summarise(events)["validation_stale_round"] is None, "as far as the events tell, it is of the last model"
    [*_, last] = [event for event in events if event["kind"] == "score"]
    last |= {"final": False, "metrics": {"accuracy": 0.5}}
    summary = summarise(events)
    told = story(summary, events)
    assert summary["validation_stale_round"] == 7 and summary["rounds_closed"] == 8
    assert "Validation loss of the global model went from 5.50 to 2.25 at round 7 of 8." in told
    assert f"{WARNING}the last model was not scored: the last figures of validation are those at round 7 of 8." in told
    last["final"] = True
    assert summarise(events)["validation_stale_round"] is None
    later = [trained(8, 1.0) | {"at": 1014.0}, said(15.0, "finished", learners=[])]
    assert summarise([*events, *later])["validation_stale_round"] == 7, "it was gone on with after its last score"
