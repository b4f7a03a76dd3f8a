"""Scores over tokens: where a score belongs, by which figure runs are compared, and at which counts of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.baselines.curves import ScoreCurve, choose_tokens, find_reason_not_to_compare, read_curve, read_curves
from atoll.protocol.errors import ConfigError


def write_run(folder: Path, *events: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "run.toml").write_text('algorithm = "data-parallel"\n')
    begun = {"kind": "run", "run": "1234", "settings": {"learners": 1, "fragments": 2}}
    lines = [{"at": float(at), "text": "", **event} for at, event in enumerate((begun, *events))]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def a_round(number: int, tokens: int) -> dict[str, Any]:
    member = {"learner": "learner-0", "incarnation": 1, "t": number, "tokens": tokens, "steps": 1}
    return {"kind": "round", "round": number, "fragment": number % 2, "live": 1, "members": [member]}


def a_score(round: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "score", "round": round, "loss": loss, "cpu_s": 0.0, "final": False}


def test_a_score_that_is_told_late_counts_at_the_tokens_of_its_own_round(tmp_path: Path) -> None:
    events = (a_score(0, 4.0), a_round(0, 100), a_round(1, 100), a_score(1, 3.0), a_score(2, 2.0), a_score(2, None))
    curve = read_curve(write_run(tmp_path / "run", *events))
    assert curve.scores == ((0, 4.0), (50, 3.0), (100, 2.0)) and curve.algorithm == "data-parallel"
    assert [curve.score_at(tokens) for tokens in (0, 25, 50, 75, 100)] == [4.0, 3.5, 3.0, 2.5, 2.0]
    unscored = write_run(tmp_path / "unscored", a_round(0, 100))
    with pytest.raises(ConfigError, match="unscored has no score to compare by: its script has to call"):
        read_curves([unscored])


def metrics(round: int, value: float, **directions: str) -> dict[str, Any]:
    found = {"nll": 1.0, "exact_match": value}
    return {**a_score(round, None), "metrics": found, "directions": directions}


def test_scores_without_a_loss_are_compared_by_the_first_metric_with_a_direction(tmp_path: Path) -> None:
    for name in ("one", "other"):
        scores = (metrics(1, 0.5, exact_match="max"), metrics(2, 0.9, exact_match="max"))
        write_run(tmp_path / name, a_round(0, 100), scores[0], a_round(1, 100), scores[1])
    for curve in read_curves([tmp_path / "one", tmp_path / "other"]):
        assert (curve.figure, curve.direction, curve.scores) == ("exact_match", "max", ((50, 0.5), (100, 0.9)))
        assert curve.describe()["scores"] == ((50, 0.5), (100, 0.9))
    write_run(tmp_path / "by-loss", a_round(0, 100), a_score(1, 2.0))
    with pytest.raises(ConfigError, match=r"no figure in common \(.*one: exact_match; .*by-loss: loss\)"):
        read_curves([tmp_path / "one", tmp_path / "by-loss"])


def test_what_can_never_be_compared_is_known_at_the_first_score() -> None:
    reason = "its scorer gives nll, exact_match, and says of none whether more or less of it is better"
    assert find_reason_not_to_compare([a_round(0, 100), metrics(1, 0.5)]) == reason
    no_number: dict[str, Any] = {**a_score(1, None), "not_finite": True}
    for score in (a_score(1, 2.0), no_number, metrics(1, 0.5, nll="min")):
        assert find_reason_not_to_compare([a_round(0, 100), score]) == ""
    text = "the model is not scored: this script brings no scorer"
    warning = {"kind": "warning", "text": f"{text}; the run goes on", "process": "evaluator", "unscored": True}
    assert find_reason_not_to_compare([warning]) == text
    assert find_reason_not_to_compare([{"kind": "warning", "text": "something else"}]) == ""


def test_runs_are_compared_where_all_of_them_were_scored() -> None:
    one, other = ((0, 4.0), (700, 2.0)), ((70, 4.0), (900, 1.0))
    curves = [ScoreCurve(Path(), "decoupled", losses, None) for losses in (one, other)]
    assert choose_tokens(curves) == [70 + 90 * row for row in range(8)]
    with pytest.raises(ConfigError, match="no common count of tokens"):
        choose_tokens([curves[0], ScoreCurve(Path(), "decoupled", ((800, 1.0),), None)])
