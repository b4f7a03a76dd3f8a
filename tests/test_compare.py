"""`atoll compare` up to the moment a process is started; tests/system has the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import cli
from atoll.baselines.compare import as_synchronous, comparable, product_outcome, rank_faults
from atoll.baselines.faults import RankFault
from atoll.chaos.plan import FaultPlan, load_plan, parse_plan
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir


def plan(**document: Any) -> FaultPlan:
    return parse_plan({"config": {"protocol": {"learners": 3}, "workload": {"pace_s": 0.5}}, **document}, "plan.toml")


def test_faults_of_learners_happen_to_ranks_and_the_others_are_named() -> None:
    made = plan(
        fault=[
            {"kind": "kill", "target": "learner-2", "at_s": 3.0},
            {"kind": "slow", "target": "learner-1", "at_s": 1.0, "for_s": 5.0, "size": 0.5},
            {"kind": "syncer-kill", "at_s": 2.0},
            {"kind": "partition", "target": ["learner-0", "learner-1"], "at_s": 2.0, "for_s": 1.0},
            {"kind": "restart", "target": "learner-0", "at_round": 9},
        ]
    )
    faults, left_out = rank_faults(made)
    assert faults == (RankFault(1.0, "slow", 1, 5.0, 0.5), RankFault(3.0, "kill", 2))
    assert left_out == ("partition", "restart", "syncer-kill")


def test_the_budget_outlasts_the_plan_at_its_pace() -> None:
    assert comparable(plan(seconds=60.0), "plan.toml").config.protocol.steps == 150


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"script": ["mine.py"]}, "for the built-in workload. Without faults: atoll compare mine.py"),
        ({}, "the learning rate has nothing to follow: set pace_s"),
        ({"workload": {"pase_s": 1.0}}, "unknown key 'pase_s': did you mean pace_s, parallel or betas?"),
    ],
)
def test_a_plan_that_cannot_be_compared_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.toml") as caught:
        comparable(plan(config=config), "plan.toml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_synchronous_diloco_is_the_whole_model_at_once() -> None:
    rules = as_synchronous(plan().config).protocol
    assert (rules.synchronous, rules.fragments, rules.overlap, rules.learners) == (True, 1, 0, 3)


def test_what_the_dead_had_not_given_and_pauses_are_no_goodput() -> None:
    events = [
        {"at": 0.0, "kind": "recovered", "learner": "learner-0", "incarnation": 1},
        {"at": 2.0, "kind": "fault", "number": 1, "what": "pause", "targets": ["learner-1"]},
        {"at": 4.0, "kind": "mended", "number": 1},
        {"at": 10.0, "kind": "ending"},
    ]
    summary = {
        "goodput": 0.9,
        "uptime": 1.0,
        "tokens": {"computed": 100, "merged": 80, "lost": 10},
        "settings": {"learners": 2},
        "wall_s": 10.0,
        "rounds": 7,
        "restarts": 1,
        "longest_gap_s": 0.5,
        "validation_loss_end": 2.0,
    }
    found = product_outcome("decoupled", summary, events)
    assert found.goodput == pytest.approx(0.9 * 0.9 - 2 / 20)
    assert (found.tokens, found.updates, found.faults) == (80, 7, 1)


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "compare", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("seconds = 0", "", "seconds = 0 must be from 1 to 86400"),
        ("[[fault]]\nkind = 'kil'\nat_s = 1", "", "there is no fault 'kil'"),
        ("", "--methods decoupled,fsdp", "--methods 'decoupled,fsdp': there is no 'fsdp'; take decoupled,"),
        ("", "", "the learning rate has nothing to follow"),
        ("[config.workload]\npace_s = 1", "--out old", "already holds a run: choose another folder with --out"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(text)
    (tmp_path / "old" / "decoupled").mkdir(parents=True)
    (tmp_path / "old" / "decoupled" / "run.toml").write_text("")
    assert atoll(monkeypatch, "plan.toml", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("mine.py", "a comparison needs an end that both come to: name --steps or --tokens"),
        ("missing.py --steps 9", "there is no script missing.py"),
        ("mine.py --steps 9 --methods elastic-data-parallel", "take decoupled, synchronous-diloco, data-parallel"),
        ("mine.py --steps 9 --set store=s3://bucket/run", "store and ranks are for one run"),
        ("plan.toml --steps 9", "--steps is for comparing a script: atoll compare SCRIPT.py"),
        ("runs runs --out new", "runs that are over are only read: leave --methods and --out out"),
        ("runs runs", "runs holds no run: name the folder that --out made"),
        ("mine.py plan.toml", "name a script, a plan of faults, or the folders of runs"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "plan.toml").write_text("")
    (tmp_path / "runs").mkdir()
    assert atoll(monkeypatch, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_whose_scores_cannot_be_compared_is_refused_before_the_second_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    trained: list[str] = []

    def train_here(config: Any, place: RunDir, *rest: Any, find_reason_to_end: Any, **options: Any) -> None:
        trained.append(place.path.name)
        begun = {"kind": "run", "run": "1234", "settings": {"learners": 1, "fragments": 2}}
        score = {"kind": "score", "round": 1, "loss": None, "metrics": {"nll": 1.0}}
        events: list[dict[str, Any]] = [{"at": 1.0, "text": "", **event} for event in (begun, score)]
        place.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert find_reason_to_end(events) == "its scores cannot be compared"

    monkeypatch.setattr("atoll.cli.compare.train_here", train_here)
    assert atoll(monkeypatch, "mine.py", "--steps", "9", "--out", "both") == 2
    assert trained == ["decoupled"]
    said = " ".join(capsys.readouterr().err.split())
    assert "decoupled cannot be compared: its scorer gives nll, and says of none whether more or less" in said


def test_a_run_without_its_last_score_is_named_below_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, last in (("decoupled", 7), ("data-parallel", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text("")
        events: list[dict[str, Any]] = [{"kind": "run", "run": "1234", "settings": {"learners": 1, "fragments": 1}}]
        for number in range(8):
            if number in (0, last):
                events.append({"kind": "score", "round": number, "loss": 4.0 - number / 4})
            member = {"learner": "learner-0", "incarnation": 1, "t": number, "tokens": 100, "steps": 1}
            events.append({"kind": "round", "round": number, "fragment": 0, "live": 1, "members": [member]})
        final = [{"kind": "score", "round": 8, "loss": 1.0, "final": True}] if last == 7 else []
        events += [*final, {"kind": "finished", "reason": "8 steps are done"}]
        lines = [json.dumps({"at": float(at), "text": "", **event}) for at, event in enumerate(events)]
        (tmp_path / name / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert atoll(monkeypatch, "decoupled", "data-parallel") == 0
    said = capsys.readouterr().out
    assert "data-parallel has no score of its last model: its last is at 300 of 800 tokens." in said
    assert "So the table ends at 300 tokens." in said and "decoupled has no score" not in said
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    assert rows["0"][1:] == ["4.00*", "4.00*"] and rows["300"][-1] == "3.25*"
    assert not rows["300"][1].endswith("*"), "on the line between two scores"
    assert rows["last"][-2:] == ["1.00", "3.25"] and rows["at"][-2:] == ["800", "300"]


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--help") == 0
    assert "atoll compare examples/kills.toml" in capsys.readouterr().out


def test_the_example_can_be_compared() -> None:
    path = Path(__file__).parents[1] / "examples" / "kills.toml"
    made = comparable(load_plan(path), str(path))
    faults, left_out = rank_faults(made)
    assert len(faults) == len(made.list_faults()) > 3 and not left_out
