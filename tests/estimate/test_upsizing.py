"""What a newcomer costs: the closed forms, and who stands still when."""

from __future__ import annotations

import csv
import io
import json
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import cli
from atoll.estimate.upsizing import (
    CHANGED,
    METHODS,
    STATE,
    CopyPeriod,
    UpsizingMethod,
    downtime_steps,
    grow,
    steps_per_copy,
)
from atoll.protocol.errors import ConfigError

copies = st.floats(1e-3, 1e5)
every = st.integers(1, 10_000)


@given(c=copies, h=every)
def test_data_parallel_stands_still_for_three_copies(c: float, h: int) -> None:
    assert downtime_steps(grow("elastic-data-parallel", c, h)) == pytest.approx(3 * c)


@given(c=copies, h=every)
def test_decoupled_stands_still_for_what_of_four_copies_the_recovery_bound_does_not_hide(c: float, h: int) -> None:
    assert downtime_steps(grow("decoupled", c, h)) == pytest.approx(max(0.0, 4 * c - h), abs=1e-9 * (4 * c + h))


@given(method=st.sampled_from(METHODS), c=copies, h=every)
def test_the_link_is_never_idle_and_carries_every_copy_in_order(method: UpsizingMethod, c: float, h: int) -> None:
    story = grow(method, c, h)
    for before, after in pairwise(story):
        assert after.start == pytest.approx(before.start + before.steps)
        assert before.training or not after.training, "who stands still does so to the end"
    needed = [*STATE, CHANGED] if method == "decoupled" else [*STATE]
    assert list(dict.fromkeys(stretch.copy for stretch in story)) == needed
    assert sum(stretch.steps for stretch in story) == pytest.approx(c * len(needed))


def test_a_story_is_told_copy_by_copy() -> None:
    assert grow("decoupled", 10.0, 24) == [
        CopyPeriod(0.0, 10.0, "weights", training=True),
        CopyPeriod(10.0, 10.0, "first moment", training=True),
        CopyPeriod(20.0, 4.0, "second moment", training=True),
        CopyPeriod(24.0, 6.0, "second moment", training=False),
        CopyPeriod(30.0, 10.0, "fragments that changed", training=False),
    ]


def test_a_copy_takes_its_bits_over_the_link() -> None:
    assert steps_per_copy(gbit=160.0, gbit_s=10.0, step_s=2.0) == 8.0
    with pytest.raises(ConfigError, match="gbit_s = 0 must be above 0"):
        steps_per_copy(160.0, 0.0, 2.0)


def atoll(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "simulate", "upsizing", *words.split()])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_answers_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--copy-steps 5,20 --sync-every 24 --extra 0.25,1.0 --json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["method"], one["copy_steps"], one["downtime_steps"]) for one in document["upsizing"]] == [
        ("elastic-data-parallel", 5.0, 15.0),
        ("decoupled", 5.0, 0.0),
        ("elastic-data-parallel", 20.0, 60.0),
        ("decoupled", 20.0, 56.0),
    ]
    assert document["scavenging"] == [
        {"extra": 0.25, "share": 0.5, "train_time": 0.9},
        {"extra": 1.0, "share": 0.5, "train_time": 0.75},
    ]


def test_the_command_computes_the_copies_from_a_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "--parameters 5B --gbit-s 1,10 --step-s 5 --codec bf16 --json") == 0
    found = json.loads(capsys.readouterr().out)["upsizing"]
    assert {one["copy_steps"] for one in found} == {16.0, 1.6}


def test_csv_has_both_answers_under_one_header(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "--copy-steps 5 --extra 1 --hours 0-24 --csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["downtime_steps"] for row in rows] == ["15.0", "0.0", ""]
    assert [row["train_time"] for row in rows] == ["", "", "0.5"]


def test_a_person_gets_two_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "") == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decoupled", "12", "24", "24"] in printed
    assert ["+100", "%", "50", "%", "0.75"] in printed


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--help") == 0
    assert "atoll simulate upsizing --copy-steps 5,20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--copy-steps 0", "copy_steps = 0 must be above 0"),
        ("--copy-steps few", "--copy-steps 'few': 'few' is no number"),
        ("--copy-steps 5 --gbit-s 1", "--copy-steps and --gbit-s exclude each other"),
        ("--parameters 5B", "--parameters needs a link: say how wide it is with --gbit-s"),
        ("--parameters -5B --gbit-s 1", "the model's size = -160 must be above 0"),
        ("--gbit-s 0", "gbit_s = 0 must be above 0"),
        ("--gbit-s 1 --step-s -1", "step_s = -1 must be above 0"),
        ("--gbit-s 1 --codec int3", "--codec 'int3': there is no 'int3'; take fp32, bf16, int8, int4, topk"),
        ("--sync-every 0", "sync_every = 0 is too small: the least is 1"),
        ("--sync-every 2.5", "--sync-every '2.5': 2.5 is no whole number"),
        ("--extra -0.5", "extra = -0.5 must not be below 0"),
        ("--share 1.5", "share = 1.5 must be from 0 to 1"),
        ("--share 0.5 --hours 20-8", "--share and --hours exclude each other"),
        ("--hours 20", "--hours 20: write when the extra comes and goes, as in 20-8"),
        ("--hours 20-25", "there is no hour 25 in a day: take 0 to 24"),
        ("--hours 8-8", "hours 8-8 are no time at all: for all day, write 0-24"),
        ("--hours 20-8 --work-h 0", "work_h = 0 must be above 0"),
        ("--json --csv", "--json and --csv exclude each other"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, words) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("atoll: ") and said in err and err.count("\n") == 1
