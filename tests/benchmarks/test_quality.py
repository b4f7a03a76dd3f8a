"""The file of the quality table: what it has is not trained again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import quality
from quality import ROWS, Table

OPTIONS = {"depth": 2, "betas": [0.9, 0.99]}


def a_run(loss: float) -> dict[str, Any]:
    return {"loss": loss, "seconds": 90.0, "up_bytes_per_token": 1.0, "down_bytes_per_token": 1.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table with data-parallel and one row with phases."""
    table = Table(tmp_path / "quality.json", OPTIONS)
    table.add_run("dp", 0, a_run(1.0))
    table.add_run("h2-moments", 0, a_run(1.02))
    return tmp_path / "quality.json"


def test_a_row_and_seed_that_the_file_has_is_not_run_again(path: Path) -> None:
    table = Table(path, OPTIONS)
    assert table.has_run("h2-moments", 0) and table.has_run("dp", 0)
    assert not table.has_run("h2-moments", 1) and not table.has_run("h2", 0)
    assert table.compare_rows()["h2-moments"]["above_percent"] == pytest.approx(2.0)
    assert table.expected_s(ROWS["h2-moments"]) == 90.0


def test_a_row_that_has_changed_is_run_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quality.ROWS, "h2-moments", msgspec.structs.replace(ROWS["h2-moments"], overlap=3))
    table = Table(path, OPTIONS)
    assert table.has_run("dp", 0) and not table.has_run("h2-moments", 0)


def test_a_row_of_before_a_field_was_added_counts_all_the_same(path: Path) -> None:
    told = json.loads(path.read_text())
    assert told["rows"]["h2-moments"].pop("misses") == 0.0
    path.write_text(json.dumps(told))
    assert Table(path, OPTIONS).has_run("h2-moments", 0)
    told["rows"]["h2-moments"]["misses"] = 0.5
    path.write_text(json.dumps(told))
    assert not Table(path, OPTIONS).has_run("h2-moments", 0)


def test_a_file_of_other_options_is_left_alone(path: Path) -> None:
    with pytest.raises(SystemExit, match="--out"):
        Table(path, OPTIONS | {"depth": 10})


def test_every_row_is_compared_with_a_row_of_as_many_learners() -> None:
    for row in ROWS.values():
        assert ROWS[row.against].method == "data-parallel" and ROWS[row.against].learners == row.learners


def test_rows_of_other_files_are_taken_where_they_are_missing(path: Path, tmp_path: Path) -> None:
    other = Table(tmp_path / "other.json", OPTIONS)
    other.add_run("dp", 0, a_run(9.0))
    other.add_run("dp", 1, a_run(1.1))
    other.add_run("default", 0, a_run(1.3))
    table = quality.join_tables(path, [tmp_path / "other.json"])
    assert Table(path, {}).results == table.results
    assert [run["loss"] for run in table.results["dp"].values()] == [1.0, 1.1]
    assert table.has_run("default", 0) and table.options == OPTIONS
