"""Losses over tokens: where a score belongs, and which counts of tokens runs are compared at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.baselines.curves import LossCurve, choose_tokens, read_curve
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
    assert curve.losses == ((0, 4.0), (50, 3.0), (100, 2.0)) and curve.algorithm == "data-parallel"
    assert [curve.loss_at(tokens) for tokens in (0, 25, 50, 75, 100)] == [4.0, 3.5, 3.0, 2.5, 2.0]
    unscored = write_run(tmp_path / "unscored", a_round(0, 100))
    with pytest.raises(ConfigError, match=r"unscored has no validation loss: its script has to call atoll\.evaluate"):
        read_curve(unscored)


def test_runs_are_compared_where_all_of_them_were_scored() -> None:
    one, other = ((0, 4.0), (700, 2.0)), ((70, 4.0), (900, 1.0))
    curves = [LossCurve(Path(), "decoupled", losses, None) for losses in (one, other)]
    assert choose_tokens(curves) == [70 + 90 * row for row in range(8)]
    with pytest.raises(ConfigError, match="no common count of tokens"):
        choose_tokens([curves[0], LossCurve(Path(), "decoupled", ((800, 1.0),), None)])
