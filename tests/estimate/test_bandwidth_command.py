"""atoll simulate bandwidth: what it prints, its JSON and CSV, and what it says to a mistake."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from atoll import cli
from atoll.cli.lists import significant

Ask: TypeAlias = Callable[[str], str]


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(words: str) -> str:
        assert atoll(monkeypatch, "simulate", "bandwidth", *words.split()) == 0
        return capsys.readouterr().out

    return ask


def test_the_usual_question_covers_the_published_tables(asked: Ask) -> None:
    rows = json.loads(asked("--json"))
    assert len(rows) == 2 * 2 * 3 * 5
    keys = {"method", "codec", "step_s", "datacenters", "utilization", "gbit_s"}
    for row in rows:
        assert row.keys() == (keys if row["method"] == "data-parallel" else keys | {"effective_h", "late_steps"})
    kinds = {(row["method"], row["codec"]) for row in rows}
    assert kinds == {("data-parallel", "bf16"), ("decoupled", "bf16"), ("decoupled", "int4")}
    assert {row["utilization"] for row in rows} == {0.5, 0.75, 0.9, 0.95, 0.99}


def test_a_person_gets_a_table_and_where_it_is_from(asked: Ask) -> None:
    printed = asked("")
    assert ["decoupled", "bf16", "1", "s", "2", "0.59", "1.2", "1.7", "1.9", "2.2"] in [
        line.split() for line in printed.splitlines()
    ]
    assert "a fit, not the authors' values" in printed


def test_fractions_and_percent_are_the_same_question(asked: Ask) -> None:
    assert asked("--json --utilization 0.5,0.9") == asked("--json --utilization 50,90%")


def test_the_other_way_round_gives_the_utilization_back(asked: Ask) -> None:
    where = "--step-s 1 --datacenters 2 --codec bf16 --profile atoll --latency-s 0.02"
    there = json.loads(asked(f"{where} --utilization 0.6 --json --methods decoupled"))
    back = json.loads(asked(f"{where} --gbit-s {there[0]['gbit_s']!r} --json --methods decoupled"))
    assert back[0]["utilization"] == pytest.approx(0.6)
    assert back[0]["effective_h"] == pytest.approx(there[0]["effective_h"]) and back[0]["late_steps"] > 0


def test_freshness_is_shown_where_bandwidth_is_given(asked: Ask) -> None:
    printed = asked("--profile atoll --gbit-s 1,100")
    assert "effective H, steps late" in printed and " 640, 38 " in printed
    assert "versions come down in fp32" in " ".join(printed.split())
    assert json.loads(asked("--profile atoll --gbit-s 1 --methods decoupled --json"))[0]["down"] == "fp32"


def test_csv_leaves_out_what_data_parallel_has_not(asked: Ask) -> None:
    rows = list(csv.DictReader(io.StringIO(asked("--csv --utilization 0.5 --step-s 1 --datacenters 2"))))
    assert [row["late_steps"] == "" for row in rows] == [True, False, False]


def test_settings_of_the_profile_give_way_to_the_command_line(asked: Ask) -> None:
    words = "--json --utilization 0.5 --step-s 1 --datacenters 2 --methods decoupled --codec bf16"
    twice = json.loads(asked(f"{words} --parameters 10B"))[0]["gbit_s"]
    assert twice == 2 * json.loads(asked(words))[0]["gbit_s"]
    small = json.loads(asked(f"{words} --parameters 350M --sync-every 24 --fragments 24 --overlap 2 --learners 2"))
    assert small[0]["gbit_s"] == pytest.approx(0.35 * 16 / 24 / 2)


@pytest.mark.parametrize("name", ["curves.html", "curves.png"])
def test_curves_are_drawn_beside_the_answer(asked: Ask, tmp_path: Path, name: str) -> None:
    pytest.importorskip("atoll.observe.plots")
    pytest.importorskip("plotly" if name.endswith("html") else "matplotlib")
    rows = json.loads(asked(f"--json --step-s 1 --datacenters 1,2 --plot {tmp_path / name}"))
    assert len(rows) == 30 and (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--profile papers", "there is no profile 'papers': take paper-table, paper, atoll"),
        ("--step-s 0", "step_s = 0 must be above 0"),
        ("--step-s one", "--step-s 'one': 'one' is no number"),
        ("--step-s 1,,5", "--step-s '1,,5': a value is missing"),
        ("--datacenters 0", "datacenters = 0 must be above 0"),
        ("--datacenters 2.5", "--datacenters '2.5': 2.5 is no whole number"),
        ("--datacenters 9", "8 learners cannot be in 9 data centers"),
        ("--learners -1", "learners = -1 must be above 0"),
        ("--learners many", "--learners 'many': 'many' is no number"),
        ("--parameters -5B", "parameters = -5e+09 must be above 0"),
        ("--overlap -1", "overlap = -1 must not be below 0"),
        ("--overlap 100", "overlap = 100 is not below sync_every = 100"),
        ("--fragments 101", "fragments = 101 is more than sync_every = 100"),
        ("--sync-every 10", "fragments = 18 is more than sync_every = 10"),
        ("--latency-s -0.1", "latency_s = -0.1 must not be below 0"),
        ("--latency-s 0.05", "data-parallel, step 1 s, 2 data centers: no bandwidth gives a utilization of 0.95"),
        ("--latency-s 2 --methods decoupled", "it stays below 0.735; ask for less, lower latency_s"),
        ("--utilization 1", "--utilization 1: 1 cannot be reached"),
        ("--utilization 100%", "--utilization 100%: 100% cannot be reached"),
        ("--utilization 0.5,0", "--utilization 0.5,0: 0 cannot be reached"),
        ("--utilization 1.5", "take above 0 and below 1, as 0.9 or 90%"),
        ("--utilization half", "'half' is no number"),
        ("--utilization 0.5 --gbit-s 1", "--utilization and --gbit-s exclude each other"),
        ("--gbit-s 0", "gbit_s = 0 must be above 0"),
        ("--step-s 1e-300 --gbit-s 1e-300", "step_s = 1e-300 is out of range: take 1e-09 to 1e+18"),
        ("--codec int3", "--codec 'int3': there is no 'int3'; take fp32, bf16, int8, int4, topk"),
        ("--methods diloco", "--methods 'diloco': there is no 'diloco'; take data-parallel, decoupled"),
        ("--topology tree", "there is no topology 'tree': take ring, star"),
        ("--json --csv", "--json and --csv exclude each other"),
        ("--plot curves.pdf", "--plot curves.pdf: write FILE.html or FILE.png"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "simulate", "bandwidth", *words.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("atoll: ") and said in err and err.count("\n") == 1


def test_help_has_an_example_and_says_what_a_slow_link_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "simulate", "bandwidth", "--help") == 0
    printed = capsys.readouterr().out
    assert "atoll simulate bandwidth --profile atoll" in printed and "costs freshness" in printed


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.5812, "0.58"), (0.996, "1.0"), (1.23, "1.2"), (9.96, "10"), (131.99, "132")]
)
def test_two_digits_are_enough(value: float, shown: str) -> None:
    assert significant(value) == shown
