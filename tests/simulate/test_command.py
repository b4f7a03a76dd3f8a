"""atoll simulate faults: what it prints, its JSON, its exit code, and what it says to a mistake."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from atoll import cli
from atoll.protocol.syncer.rounds import Rounds
from atoll.simulate.reports import all_of, report, reports


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seeds 0", "--seeds 0 is too small: the least is 1"),
        ("--learners 0", "--learners 0 cannot be simulated: take 1 to 64"),
        ("--learners 65", "--learners 65 cannot be simulated: take 1 to 64"),
        ("--seed -3", "--seed -3 is below 0: seeds are 0, 1, 2, …"),
        ("--first -1", "--first -1 is below 0: seeds are 0, 1, 2, …"),
        ("--worlds many", "--worlds many is not known: take plain, ranks, shards, relays or links"),
        ("--first 5 --seed 3", "--first is for many worlds: with --seed there is one"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "simulate", "faults", *words.split()) == 2
    assert capsys.readouterr().err.strip() == f"atoll: {said}"


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "simulate", "faults", "--help") == 0
    assert "atoll simulate faults --seeds 2000" in capsys.readouterr().out


def test_one_seed_prints_its_world(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "simulate", "faults", "--seed", "3", "--learners", "2") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3: 2 learners, ") and " trace " in printed
    assert "every promise holds" in printed.splitlines()[-1]


@pytest.mark.faults
def test_many_seeds_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The next test has its sample in every run of the tests."""
    assert atoll(monkeypatch, "simulate", "faults", "--seeds", "3", "--learners", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"seeds", "first", "events", "seconds", "violations"}
    assert document["seeds"] == 3 and document["events"] > 3000 and document["violations"] == []


def test_many_seeds_as_json_begin_where_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("simulate", "faults", "--seeds", "2", "--first", "5", "--learners", "2", "--json")
    assert atoll(monkeypatch, *words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"seeds", "first", "events", "seconds", "violations"}
    assert document["events"] > 2000 and document["violations"] == []
    alone = sum(report(seed, 2, traced=False).outcome.events for seed in (5, 6))
    assert (document["seeds"], document["first"], document["events"]) == (2, 5, alone)


def test_a_broken_promise_ends_in_1_and_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Rounds, "has_given", lambda *arguments: False)
    seed = str(_first_with("doubled"))
    assert atoll(monkeypatch, "simulate", "faults", "--seed", seed, "--learners", "3", "--json") == 1
    out, err = capsys.readouterr()
    (violation,) = json.loads(out)["violations"]
    expected = {"seed", "learners", "invariant", "message", "command", "faults", "story"}
    assert violation.keys() == expected and violation["seed"] == int(seed)
    assert violation["command"] == f"atoll simulate faults --seed {seed} --learners 3"
    assert {fault["kind"] for fault in violation["faults"]} >= {"doubled"} and violation["story"]
    assert violation["command"] in err and violation["invariant"] in err


def _first_with(kind: str) -> int:
    """A world of three learners that things are said twice in, and that breaks for it; 14 was the first once."""
    return next(seed for seed in (14, *range(60)) if _breaks(seed, kind))


def _breaks(seed: int, kind: str) -> bool:
    from atoll.simulate import campaign

    plan = campaign.plan(seed, 3)
    return kind in {fault.kind for fault in plan.faults} and bool(campaign.run(plan).invariant)


def test_workers_report_every_seed_once_whatever_the_order() -> None:
    found: list[Any] = list(all_of(range(5), 2, workers=2))
    assert sorted(one.outcome.seed for one in found) == [0, 1, 2, 3, 4]
    alone = {one.outcome.seed: one.outcome.events for one in found}
    for line in reports(iter(["1\n", "4\n"]), 2):
        outcome = json.loads(line)["outcome"]
        assert outcome["events"] == alone[outcome["seed"]], "the same in this process"
