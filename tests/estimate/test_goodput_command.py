"""atoll simulate goodput and calibrate: what they print, their JSON and files, and what they say to a mistake."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import cli
from atoll.estimate.profile import load

Ask = Callable[..., tuple[int, str, str]]
FEW = ("--seeds", "2", "--hours", "1", "--rounds", "8")


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["atoll", "simulate", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "100")
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return ask


def test_the_whole_table_is_what_a_bare_call_gives(atoll: Ask) -> None:
    code, out, _ = atoll("goodput", "--profile", "paper", "--json", "--seeds", 1, "--hours", 0.5, "--rounds", 0)
    cells: list[dict[str, Any]] = json.loads(out)
    assert code == 0 and len(cells) == 30
    ways = {(cell["method"], cell["learners"]) for cell in cells}
    assert ways == {("data-parallel", 1), ("elastic-data-parallel", 1), *(("decoupled", m) for m in (2, 4, 8, 16))}
    assert {cell["chips"] for cell in cells} == {150_000, 300_000, 600_000, 1_200_000, 2_400_000}
    assert all(0 <= cell["goodput"] <= cell["uptime"] <= 1 for cell in cells)


def test_lists_choose_the_cells_and_seeds_give_intervals(atoll: Ask) -> None:
    _, out, _ = atoll("goodput", "--json", "--learners", "1,4", "--chips", "150k,2400000", *FEW)
    cells = json.loads(out)
    assert [(cell["learners"], cell["chips"]) for cell in cells][-2:] == [(4, 150_000), (4, 2_400_000)]
    last = cells[-1]
    assert last["goodput_interval"][0] <= last["goodput"] <= last["goodput_interval"][1]
    assert last["participation"] is not None and cells[0]["participation"] is None
    assert last["goodput"] + sum(last["lost"].values()) == pytest.approx(1.0)


def test_a_person_gets_tables_and_where_the_constants_are_from(atoll: Ask) -> None:
    _, out, _ = atoll("goodput", "--learners", "1,8", "--chips", "150k,2.4M", *FEW)
    assert "goodput % by chips" in out and "uptime % by chips" in out and "on 2.4M chips" in out
    assert "scaling down" in out and "not its authors' values" in out


def test_csv_has_a_column_for_every_figure(atoll: Ask) -> None:
    _, out, _ = atoll("goodput", "--csv", "--learners", "2", "--chips", "150k,1.2M", *FEW)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["chips"] for row in rows] == ["150000", "1200000"]
    assert {"goodput", "goodput_low", "goodput_high", "uptime", "tokens_per_hour", "lost: scaling down"} <= rows[
        0
    ].keys()
    assert float(rows[0]["goodput_low"]) <= float(rows[0]["goodput"]) <= float(rows[0]["goodput_high"])


def test_pictures_are_written(atoll: Ask, tmp_path: Path) -> None:
    heat, lanes = tmp_path / "heat.html", tmp_path / "lanes.png"
    code, _, _ = atoll(
        "goodput", "--learners", "1,4", "--chips", "150k,2.4M", *FEW, "--plot", heat, "--timeline", lanes
    )
    assert code == 0 and "elastic data-parallel, M = 1" in heat.read_text()
    assert lanes.read_bytes().startswith(b"\x89PNG")


def test_any_key_of_the_profile_can_be_set_and_shown(atoll: Ask, tmp_path: Path) -> None:
    words = ("--set", "preemption.every_s=7200", "--step-s", "3", "--quorum", "2", "--no-grace")
    code, out, _ = atoll("goodput", "--show-profile", *words)
    file = tmp_path / "mine.toml"
    file.write_text(out)
    profile = load(str(file))
    assert code == 0 and profile.preemption.every_s == 7200.0 and profile.step_s == 3.0
    assert profile.rules.quorum == 2 and profile.rules.grace is False and profile.slices == 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learners 3", "1024 slices cannot be dealt evenly to 3 learners: take --learners 2, or --slices 1023"),
        ("--learners 0", "--learners 0: 0 is too small, the least is 1"),
        ("--learners -4", "--learners -4: -4 is too small, the least is 1"),
        ("--chips 0", "--chips 0: 0 is too small, the least is 1"),
        ("--chips few", "--chips 'few': 'few' is no number"),
        ("--chips 100", "100 chips cannot make 1024 slices: take --slices 100 or fewer"),
        ("--slices 0", "slices = 0 is too small: it must be above 0"),
        ("--step-s -1", "step_s = -1.0 must be a number of 0 or more"),
        ("--step-s 0", "step_s = 0.0 is too small: it must be above 0"),
        ("--hours 0", "hours = 0: it must be above 0"),
        ("--hours nan", "hours = nan"),
        ("--seeds 0", "--seeds 0"),
        ("--rounds -1", "--rounds -1"),
        ("--profile nature", "there is no profile 'nature': take paper or spot, or a file of your own"),
        ("--profile gone.toml", "cannot read profile gone.toml"),
        ("--methods hogwild", "there is no 'hogwild'"),
        ("--methods data-parallel --learners 4", "nothing is left"),
        ("--quorum 9 --learners 8", "a quorum of 9 can never be reached by 8 learners"),
        ("--set preemption", "--set preemption: write KEY=VALUE"),
        ("--set nothing.at_all=1", "a profile has no 'nothing.at_all'"),
        ("--set step_s=fast", "Expected `float`, got `str`"),
        ("--plot picture.svg", "write FILE.html or FILE.png"),
        ("--plot nowhere/picture.png", "the folder nowhere does not exist"),
        ("--json --csv", "--json and --csv exclude each other"),
    ],
)
def test_a_mistake_is_one_line(atoll: Ask, words: str, said: str) -> None:
    code, out, err = atoll("goodput", *words.split())
    assert code == 2 and out == "" and said in err and err.count("\n") == 1 and err.startswith("atoll: ")


@pytest.mark.parametrize("command", ["goodput", "calibrate", "bandwidth", "upsizing"])
def test_help_has_an_example(atoll: Ask, command: str) -> None:
    code, out, _ = atoll(command, "--help")
    assert code == 0 and f"atoll simulate {command} --" in out


def test_calibrate_prints_every_cell_and_writes_a_profile_down(atoll: Ask, tmp_path: Path) -> None:
    table, profile = tmp_path / "mine.csv", tmp_path / "mine.toml"
    table.write_text(
        "method,learners,chips,goodput,uptime\ndata-parallel,1,600000,60,\ndata-parallel,1,2400000,33,33\n"
    )
    words = ("--table", table, "--free", "elasticity.outage_s", "--hours", 12, "--seeds", 1, "--write", profile)
    code, out, _ = atoll("calibrate", *words)
    assert code == 0 and "mean error" in out and out.count("data-parallel") >= 3
    assert load(str(profile)).elasticity.outage_s < 50 and "fitted to 3 figures" in load(str(profile)).provenance
    code, out, _ = atoll("calibrate", "--table", table, "--free", "none", "--hours", 12, "--seeds", 1, "--json")
    document = json.loads(out)
    assert [cell["figure"] for cell in document["cells"]] == ["goodput", "goodput", "uptime"]
    errors = [abs(cell["error_points"]) for cell in document["cells"]]
    assert document["mean_error_points"] == pytest.approx(sum(errors) / 3, abs=1e-3) and document["constants"] == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--table gone.csv", "cannot read the table gone.csv"),
        ("--from-run gone", "gone holds no run"),
        ("--from-run gone --table gone.csv", "take one of them"),
        ("--free nothing", "'nothing' is no number of a profile"),
        ("--hours 0", "both must be above 0"),
        ("--seeds 0", "both must be above 0"),
        ("--write gone/mine.toml", "in a folder that exists"),
        ("--profile nature", "there is no profile 'nature'"),
    ],
)
def test_a_mistake_of_calibration_is_one_line(atoll: Ask, words: str, said: str) -> None:
    code, out, err = atoll("calibrate", *words.split())
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
