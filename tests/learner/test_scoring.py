"""What a scorer may return, and what becomes of it; a whole evaluator is in tests/system."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from torch import nn

import atoll
from atoll.fabric.wire import METRICS, ScoreReport, decode_score
from atoll.launch.script import is_wrong_return, remove_own_frames
from atoll.learner.evaluate import ScoredModule
from atoll.learner.evaluator import Evaluator, FetchedModel, ScoreFigures, read_figures
from atoll.learner.model import describe
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import ConfigError, Unreachable
from atoll.telemetry.status import RunStatus


@pytest.mark.parametrize(
    ("found", "figures"),
    [
        (0.5, ScoreFigures(0.5, {})),
        (torch.tensor(0.5), ScoreFigures(0.5, {})),
        (math.nan, ScoreFigures(None, {})),
        ({"loss": 0.5, "accuracy": 0.9}, ScoreFigures(0.5, {"accuracy": 0.9})),
        ({"loss": math.inf, "recall": math.nan}, ScoreFigures(None, {"recall": None})),
        ({"accuracy": torch.tensor(0.5)}, ScoreFigures(None, {"accuracy": 0.5}, has_loss=False)),
    ],
)
def test_a_scorer_returns_a_loss_or_figures_by_name(found: Any, figures: ScoreFigures) -> None:
    assert read_figures(found) == figures


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "returned NoneType as 'loss': return a loss, or figures by name"),
        ({"accuracy": "good"}, "returned str as 'accuracy'"),
        ({}, "returned 0 figures"),
        ({f"m{i}": 0.0 for i in range(METRICS + 1)}, f"return 1 to {METRICS} of them"),
        ({"m" * 65: 0.0}, "use 1 to 64 printable characters"),
        ({"\x1b[2J": 0.0}, "use 1 to 64 printable characters"),
    ],
)
def test_anything_else_is_told_with_the_way_out(found: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        read_figures(found)
    assert words in str(error.value)


def score_badly(model: nn.Module) -> str:
    return "good"


async def test_a_scorer_that_returns_no_score_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the script, so it is not one of Atoll's own, which would only end the scoring."""
    model = nn.Linear(2, 1)
    plan = make_plan(describe(model), 1, "balanced")
    manifest = {"plan": msgspec.to_builtins(plan), "run": "r", "evaluate_steps": 1}

    async def answer(*_: object) -> object:
        return manifest

    monkeypatch.setattr("atoll.learner.evaluator.get_json", answer)
    monkeypatch.setattr(Evaluator, "_fetch", answer)
    evaluator = Evaluator("http://127.0.0.1:9", ScoredModule(model), score_badly, None, {}, "")  # type: ignore[arg-type]
    line = score_badly.__code__.co_firstlineno
    words = rf"the scorer score_badly \(line {line} of test_scoring.py\) returned str as 'loss': return a loss"
    with pytest.raises(TypeError, match=words) as caught:
        await evaluator._once(0, final=False)
    assert is_wrong_return(caught.value)
    remove_own_frames(caught.value, usage=True)
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}


async def test_an_evaluator_says_which_run_it_joined_and_what_it_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, posted = nn.Linear(2, 1), []
    manifest = {"plan": msgspec.to_builtins(make_plan(describe(model), 1, "balanced")), "run": "r1"}
    status = {"phase": "finished", "round": 7, "run": "r1"}
    unsaid = {field.name: 0 for field in msgspec.structs.fields(RunStatus) if field.required}
    texts = {"members": (), "learners": (), "reason": "", "synchronous": False}

    async def answer(url: str, path: str) -> object:
        return {**unsaid, **texts, **status} if path == "/v1/status" else {**manifest, "evaluate_steps": 1}

    async def fetched(*_: object) -> FetchedModel:
        return FetchedModel("r1", 7, make_plan(describe(model), 1, "balanced"), [], [1])

    async def post(url: str, score: ScoreReport) -> None:
        posted.append(score.round)

    monkeypatch.setattr("atoll.learner.evaluator.get_json", answer)
    monkeypatch.setattr("atoll.learner.evaluator.post_score", post)
    monkeypatch.setattr(Evaluator, "_fetch", fetched)
    figures = {"loss": 0.25, "accuracy": 0.9996, "depth": math.nan}
    await Evaluator("http://127.0.0.1:9", ScoredModule(model), lambda model: figures, None, {}, "").run()
    assert posted == [7]
    assert capsys.readouterr().err == (
        "atoll: joined run r1 as its evaluator\natoll: scored round 7: loss 0.25, accuracy 0.9996, depth not finite\n"
    )


async def test_a_version_that_was_scored_is_scored_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    plan = make_plan(describe(model), 1, "balanced")
    scored: list[int] = []
    posted: list[tuple[int, bool, float | None, str]] = []
    # Of a data-parallel run no version may come for many steps, and at the end none comes behind the last.
    steps = [("training", 0, 0), ("training", 5, 0), ("training", 9, 1), ("finished", 9, 1)]
    now = steps[0]

    async def answer(url: str, path: str) -> object:
        nonlocal now
        if path != "/v1/status":
            return {"plan": msgspec.to_builtins(plan), "run": "r1", "evaluate_steps": 1}
        now = steps.pop(0)
        return {**UNSAID, "phase": now[0], "global_step": now[1], "round": now[2], "versions": (now[2],)}

    async def fetch(*_: object) -> FetchedModel:
        return FetchedModel("r1", now[2], plan, [], [now[2]])

    async def post(url: str, score: ScoreReport) -> None:
        posted.append((score.round, score.final, score.loss, score.sample))

    def score(module: nn.Module) -> float:
        scored.append(now[2])
        return 0.5

    monkeypatch.setattr("atoll.learner.evaluator.POLL_S", 0.0)
    monkeypatch.setattr("atoll.learner.evaluator.get_json", answer)
    monkeypatch.setattr("atoll.learner.evaluator.post_score", post)
    monkeypatch.setattr(Evaluator, "_fetch", fetch)
    await Evaluator("http://127.0.0.1:9", ScoredModule(model), score, lambda module: "words", {}, "").run()
    assert scored == [0, 1]
    assert posted == [(0, False, 0.5, ""), (1, False, 0.5, ""), (1, True, 0.5, "words")]


UNSAID = {
    **{field.name: 0 for field in msgspec.structs.fields(RunStatus) if field.required},
    "members": (),
    "learners": (),
    "reason": "",
    "synchronous": False,
    "run": "r1",
    "phase": "finished",
    "round": 7,
}


def test_an_evaluator_by_hand_keeps_its_models_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 1)
    plan = make_plan(describe(model), 1, "balanced")
    values = [np.ones(part.size, np.float32) for part in plan.fragments]

    async def answer(url: str, path: str) -> object:
        return UNSAID if path == "/v1/status" else {"plan": msgspec.to_builtins(plan), "run": "r1", "evaluate_steps": 1}

    async def fetch(*_: object) -> FetchedModel:
        return FetchedModel("r1", 7, plan, values, [1])

    async def post(url: str, score: ScoreReport) -> None:
        pass

    monkeypatch.setattr("atoll.learner.evaluator.get_json", answer)
    monkeypatch.setattr("atoll.learner.evaluator.post_score", post)
    monkeypatch.setattr(Evaluator, "_fetch", fetch)
    for name, value in (("ATOLL_ROLE", "evaluator"), ("ATOLL_SYNCER", "http://127.0.0.1:9")):
        monkeypatch.setenv(name, value)
    for name in ("ATOLL_MODELS", "ATOLL_LEARNER", "ATOLL_JOIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        atoll.evaluate(model, lambda scored: 0.5, ema=0.9)
    folder = tmp_path / "atoll-learners" / "r1" / "evaluator"
    assert end.value.code == 0 and (folder / "model-best.safetensors").exists()
    assert (folder / "model-ema.safetensors").exists()
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"atoll: joined run r1 as its evaluator; the best model and the average are kept in {folder}"


@pytest.mark.parametrize("path", ["/v1/status", "/v1/scores"])
async def test_an_evaluator_whose_token_is_for_another_role_is_refused_before_it_joins(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(request: web.Request) -> web.Response:
        if request.path == path:
            return web.json_response({"error": "the token 'us' is for a learner"}, status=403)
        return web.Response(body=msgspec.json.encode(UNSAID))

    app = web.Application()
    app.router.add_get("/{rest:.*}", serve)
    async with TestServer(app, host="127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ConfigError, match="the token 'us' is for a learner"):
            await Evaluator(url, ScoredModule(nn.Linear(2, 1)), float, None, {}, "").run()
    assert "joined" not in capsys.readouterr().err


async def test_an_evaluator_that_has_joined_waits_for_its_syncer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has not joined gives up after GIVE_UP_S, as does one whose run was at its end."""
    unsaid = {field.name: 0 for field in msgspec.structs.fields(RunStatus) if field.required}
    texts = {"members": (), "learners": (), "reason": "", "synchronous": False, "run": "r1"}
    answers: list[str] = []

    async def answer(url: str, path: str) -> object:
        phase = answers.pop(0) if answers else "away"
        if phase == "away":
            raise Unreachable("nobody listens there")
        return {**unsaid, **texts, "phase": phase}

    async def score(*_: object) -> float:
        return 1.0

    monkeypatch.setattr("atoll.learner.evaluator.GIVE_UP_S", 0.05)
    monkeypatch.setattr("atoll.learner.evaluator.POLL_S", 0.01)
    monkeypatch.setattr("atoll.learner.evaluator.get_json", answer)
    monkeypatch.setattr(Evaluator, "_once", score)
    for told in ([], ["training", "ending"]):
        answers[:] = told
        with pytest.raises(Unreachable, match=r"no syncer answers for 0.05 s: is the run over"):
            await Evaluator("http://127.0.0.1:9", ScoredModule(nn.Linear(2, 1)), float, None, {}, "").run()
    answers[:] = ["training", *["away"] * 30, "finished"]
    capsys.readouterr()
    await Evaluator("http://127.0.0.1:9", ScoredModule(nn.Linear(2, 1)), float, None, {}, "").run()
    assert capsys.readouterr().err.splitlines() == [
        "atoll: joined run r1 as its evaluator",
        "atoll: no syncer answers this evaluator (nobody listens there): it waits for one",
        "atoll: a syncer answers again",
    ]


def test_a_plain_loss_is_sent_as_earlier_versions_sent_it() -> None:
    said = msgspec.json.decode(msgspec.json.encode(ScoreReport(round=7, loss=1.5, cpu_s=0.1)))
    assert said.keys() == {"round", "loss", "cpu_s"}


def test_as_many_metrics_as_may_be_come_through_and_no_more() -> None:
    many = ScoreReport(round=7, loss=1.5, cpu_s=0.1, metrics={f"m{i}": 0.5 for i in range(METRICS)})
    assert decode_score(msgspec.json.encode(many)) == many
    more = ScoreReport(round=7, loss=1.5, cpu_s=0.1, metrics={f"m{i}": 0.5 for i in range(METRICS + 1)})
    with pytest.raises(Exception, match="a score could not be read"):
        decode_score(msgspec.json.encode(more))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"directions": {"accuracy": "up"}}, "'accuracy' is 'up', and must be 'min' or 'max'"),
        ({"unit": "x" * 65}, "unit is 65 characters long"),
    ],
)
def test_a_wrong_word_is_told_when_the_script_starts_in_every_process(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        atoll.evaluate(nn.Linear(1, 1), lambda model: 0.0, **options)
