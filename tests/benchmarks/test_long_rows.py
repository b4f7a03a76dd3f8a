"""The plan of long rows, their states and their comparison."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import corpus
import long_rows
from corpus import Index, Piece
from long_rows import RATES, TINY, Plan, Shape, Task, Worker, describe_difference, expect_s, open_table, state_of
from quality import Table, as_json

INDEX = Index(
    manifest="0" * 64,
    packages={"train": 2, "held-out": 1},
    train=[Piece(f"train-{number}.xz", 150_000_000, str(number)) for number in range(5)],
    held_out=Piece("held-out.xz", 10_000_000, "held"),
    dropped_bytes={},
)
ABOUT = {"mixed": True}


def a_run(loss: float, seconds: float = 100.0) -> dict[str, Any]:
    return {"loss": loss, "seconds": seconds, "up_bytes_per_token": 1.0, "tokens": 1, "epochs": 0.9}


def add_search(path: Path, group: str, losses: tuple[float, ...]) -> Plan:
    """Add the rows of a search to a table; return the plan that follows from it."""
    table = open_table(path, make_plan(path), ABOUT)
    for rate, loss in zip(RATES, losses, strict=True):
        table.add_run(long_rows.dp_name(group, rate), 0, a_run(loss))
    return make_plan(path)


def make_plan(path: Path) -> Plan:
    return Plan(Shape(), INDEX, long_rows.read_content(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.json"


def test_a_row_has_twenty_tokens_for_each_parameter(path: Path) -> None:
    plan = add_search(path, "10m-m4", (1.0, 0.9, 1.1))
    plan = add_search(path, "10m-m8", (1.0, 0.9, 1.1))
    assert not plan.waiting
    for name, row in plan.rows.items():
        assert row.tokens / long_rows.count_parameters(row.depth) == pytest.approx(20, rel=1e-3), name
        assert row.pieces == (2 if name.startswith("10m") else 5)
    assert plan.rows["10m-m8-default"].steps == pytest.approx(plan.rows["10m-m4-default"].steps / 2, abs=1)


def test_rows_wait_for_the_search_of_their_learning_rate(path: Path) -> None:
    plan = make_plan(path)
    assert {task.name for task in plan.tasks()} == {
        long_rows.dp_name(group, rate) for group in ("10m-m4", "10m-m8") for rate in RATES
    }
    assert "10m-m4-carry" in plan.waiting and "10m-h96-default" in plan.waiting
    plan = add_search(path, "10m-m4", (1.0, 0.9, 1.1))
    assert plan.rates == {"10m-m4": 2e-3, "10m-m8": None}
    row = plan.rows["10m-h96-carry"]
    assert (row.train.lr, row.train.sync_every, row.train.adopt, row.against) == (2e-3, 96, "carry", "10m-m4-dp-0.002")
    assert "10m-m8-default" in plan.waiting


def test_the_order_is_that_of_the_plan_seed_by_seed(path: Path) -> None:
    add_search(path, "10m-m4", (1.0, 0.9, 1.1))
    tasks = list(add_search(path, "10m-m8", (1.0, 1.0, 0.8)).tasks())
    assert len(tasks) == len(set(tasks))
    groups = [
        next(group.name for group in long_rows.GROUPS if task.name.startswith(group.name + "-")) for task in tasks
    ]
    order = [group.name for group in long_rows.GROUPS]
    assert groups == sorted(groups, key=order.index)
    first = [task for task, group in zip(tasks, groups, strict=True) if group == "10m-m4"]
    assert [task.seed for task in first] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert first[5:8] == [Task("10m-m4-dp-0.002", 1), Task("10m-m4-default", 1), Task("10m-m4-carry", 1)]


def test_every_row_is_compared_with_data_parallel_of_its_batch(path: Path) -> None:
    add_search(path, "10m-m4", (1.0, 0.9, 1.1))
    plan = add_search(path, "10m-m8", (1.0, 0.9, 1.1))
    for name, row in plan.rows.items():
        other = plan.rows[row.against]
        assert other.train.method == "data-parallel" and other.train.lr == row.train.lr
        assert (other.steps, other.depth, other.pieces) == (row.steps, row.depth, row.pieces), name
        assert other.batch * other.train.learners == row.batch * row.train.learners


@pytest.mark.parametrize(
    ("above", "spread", "seeds", "expected"),
    [
        (0.5, 0.6, 3, "none (spread 0.60, 3 seeds)"),
        (-0.5, 0.6, 2, "none (spread 0.60, 2 seeds)"),
        (0.7, 0.6, 3, "+0.70 % (spread 0.60, 3 seeds)"),
        (0.7, 0.0, 1, "+0.70 % (one seed, spread unknown)"),
        (None, 0.0, 0, "not compared"),
    ],
)
def test_a_difference_below_its_spread_is_none(above: float | None, spread: float, seeds: int, expected: str) -> None:
    assert describe_difference(above, spread, seeds) == expected


def test_a_row_whose_heartbeat_stopped_is_cut_off_and_is_trained_again(path: Path) -> None:
    plan = add_search(path, "10m-m4", (1.0, 0.9, 1.1))
    table = open_table(path, plan, ABOUT)
    beat = {"state": "running", "began": 1000.0, "step": 700, "steps": 15000, "at": 1100.0}
    beats = {
        "at": 1100.0,
        "rows": {"10m-m4-default/0": beat, "10m-m4-carry/0": {"state": "failed: out of memory"}},
    }
    running = Task("10m-m4-default", 0)
    assert state_of(running, table, beats, 1120.0) == "running, step 700 of 15,000, for 2.0 min"
    assert state_of(running, table, beats, 1100.0 + long_rows.STALE_S + 1) == "cut off at step 700 of 15,000"
    assert state_of(Task("10m-m4-carry", 0), table, beats, 1120.0) == "failed: out of memory"
    assert state_of(Task("10m-m4-carry", 1), table, beats, 1120.0) == "missing"
    assert state_of(Task("10m-m4-dp-0.001", 0), table, beats, 9000.0) == "done"
    assert not table.has_run(*running), "nothing of it is in the table, so a runner trains it"


def test_a_row_takes_as_long_as_others_of_its_cost_did(path: Path) -> None:
    table = open_table(path, add_search(path, "10m-m4", (1.0, 0.9, 1.1)), ABOUT)
    rows = table.rows
    assert expect_s(rows["10m-m4-dp-0.001"], table) == 100.0
    assert expect_s(rows["10m-m4-default"], table) == pytest.approx(100.0, rel=1e-3), "as much arithmetic"
    assert expect_s(rows["35m-m4-default"], table) > 700.0


def write_text(build: Path) -> None:
    dice = np.random.default_rng(0)
    (build / corpus.train_name(1)).write_bytes(dice.integers(32, 64, 40_000, dtype=np.uint8).tobytes())
    (build / "held-out.txt").write_bytes(dice.integers(32, 64, 4_000, dtype=np.uint8).tobytes())


def test_a_row_is_trained_on_the_packed_text(tmp_path: Path) -> None:
    write_text(tmp_path)
    plan = Plan(TINY, INDEX, {})
    order = {"row": as_json(plan.rows["10m-m4-dp-0.001"]), "seed": 1, "mixed": False, "command": "c", "commit": "d"}
    run = long_rows.train_task(order, TINY, INDEX, tmp_path, tmp_path / "beat.json")
    assert np.isfinite(run["loss"]) and run["seed"] == 1
    assert run["tokens"] == pytest.approx(0.5 * run["parameters"], rel=0.05)
    assert run["epochs"] == run["tokens"] / 40_000
    assert (run["text"], run["text_bytes"]) == (INDEX.digest(1), 40_000)
    assert long_rows.read_content(tmp_path / "beat.json")["steps"] == run["steps"]


def test_text_that_is_not_unpacked_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unpack --pieces 2"):
        long_rows.PackedText(tmp_path, INDEX, 2)


def test_rows_of_other_machines_are_joined(tmp_path: Path) -> None:
    """One file has the search, the other a row that follows from it."""
    plan = add_search(tmp_path / "search.json", "10m-m4", (1.0, 0.9, 1.1))
    Table(tmp_path / "later.json", ABOUT, plan.rows).add_run("10m-m4-carry", 0, a_run(0.95))
    files = [str(tmp_path / name) for name in ("search.json", "later.json")]
    options = long_rows.make_parser().parse_args(["--join", *files, "--out", str(tmp_path / "all.json")])
    long_rows.join(options, Shape(), INDEX)
    joined = long_rows.read_content(tmp_path / "all.json")
    assert joined["compared"]["10m-m4-carry"]["above_percent"] == pytest.approx(100 * (0.95 / 0.9 - 1))


class FakeRunner(long_rows.Runner):
    """Runner whose rows end at once, but for one that goes on and one that fails."""

    def _start(self, task: Task) -> Worker:
        folder = self._options.work / f"{task.name}-{task.seed}"
        folder.mkdir(parents=True)
        code = {
            "10m-m4-default": "import time; time.sleep(60)",
            "10m-m8-dp-0.001": "print('no memory'); raise SystemExit(1)",
        }
        write = f"open('run.json', 'w').write({json.dumps(a_run(1.0, seconds=0.01))!r})"
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-S", "-c", code.get(task.name, write)]
            return Worker(task, subprocess.Popen(command, cwd=folder, stdout=log), folder, time.time())


def test_a_runner_adds_rows_that_end_and_cuts_off_what_takes_too_long(tmp_path: Path) -> None:
    words = ["--run", "--tiny", "--side-by-side", "8", "--minutes", "0.1", "--poll", "0.05", "--commit", "c"]
    options = long_rows.make_parser().parse_args([*words, "--work", str(tmp_path), "--out", str(tmp_path / "out.json")])
    runner = FakeRunner(options, INDEX)
    runner.run()
    content = long_rows.read_content(tmp_path / "table.json")
    assert {"10m-m4-dp-0.001", "10m-m4-carry", "35m-m4-dp-0.001"} <= content["results"].keys()
    assert "10m-m4-default" not in content["results"] and "10m-m8-dp-0.001" not in content["results"]
    table = open_table(tmp_path / "table.json", Plan(TINY, INDEX, content), content["options"])
    beats = long_rows.read_content(tmp_path / "beats.json")
    assert state_of(Task("10m-m4-default", 0), table, beats, time.time()) == "cut off by --minutes"
    assert state_of(Task("10m-m8-dp-0.001", 0), table, beats, time.time()) == "failed: no memory"
