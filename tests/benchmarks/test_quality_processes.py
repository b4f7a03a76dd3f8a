"""The rows of the quality table with real processes: their command lines, and what they are compared with."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import quality
import quality_processes as processes
from lockstep_engine import Row
from quality_learner import StepTimes, Task
from quality_processes import ROWS, ProcessTable

from atoll.config import convert, parse_settings
from atoll.protocol.records import ChangedRecord, MergedRecord
from atoll.protocol.settings import Settings
from atoll.workloads.settings import WorkloadSettings

OPTIONS = argparse.Namespace(mixed=True, pace=0.05, warm_pace=0.25)
WORKLOAD = WorkloadSettings(depth=10, block=256, batch=16, data=("/text",))
SEED = 7


def make_words(name: str) -> list[str]:
    task = processes.make_task(ROWS[name], SEED, OPTIONS, WORKLOAD, Path("/times"))
    return processes.make_train_words(ROWS[name], 2100, task, Path("/run"), Path("/a.tape"))


def read_config(words: list[str]) -> Settings:
    told = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    budget = [f"{key}={words[words.index(f'--{key}') + 1]}" for key in ("learners", "tokens")]
    return convert(parse_settings([*told, *budget]), "the row").protocol.resolved(1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.tape])
def test_a_row_has_as_many_tokens_as_data_parallel_of_as_many_learners(name: str) -> None:
    settings = read_config(make_words(name))
    reference = quality.ROWS[ROWS[name].against]
    assert settings.tokens == reference.learners * 2100 * 16 * 256 and settings.learners == reference.learners
    assert not settings.steps, "a slow learner must not end it earlier"


def test_rows_with_a_warm_start_have_the_phases_of_lockstep() -> None:
    warm = read_config(make_words("m4"))
    lockstep = quality.ROWS["h2-moments"].settings(2100, 1000)
    assert warm.phases == lockstep.phases and warm.shares_moments and warm.adopt == "carry"
    assert read_config(make_words("m4-default")).phases == ()
    assert read_config(make_words("km")).quorum == 4
    assert read_config(make_words("k1")).quorum_policy == "minimum"


def test_learners_train_what_the_row_of_lockstep_trains() -> None:
    for name, row in ROWS.items():
        words = make_words(name)
        assert words[words.index("--seed") + 1] == str(SEED)
        task = msgspec.json.decode(words[-1], type=Task)
        reference = quality.ROWS[row.against]
        assert (task.workload.optimizer, task.workload.lr) == (reference.optimizer, reference.lr)
        same = {"optimizer": reference.optimizer, "lr": reference.lr}
        assert task.workload == msgspec.structs.replace(WORKLOAD, **same)
        assert task.mixed and task.seed == SEED


def test_steps_of_eight_learners_last_twice_as_long_and_those_of_a_tape_as_they_come() -> None:
    four, eight, tape = (msgspec.json.decode(make_words(name)[-1], type=Task) for name in ("m4", "m8", "m8-tape"))
    assert (four.pace_s, four.warm_pace_s, four.warm_share) == (0.05, 0.25, 0.15)
    assert (eight.pace_s, eight.warm_pace_s) == (0.1, 0.5)
    assert (tape.pace_s, tape.warm_pace_s) == (0.0, 0.0)


def test_rows_of_a_tape_differ_in_their_failures_alone() -> None:
    paper, calm = (
        processes.make_tape_words(ROWS[name], 2100, SEED, Path("/a.tape")) for name in ("m8-tape", "m8-calm")
    )
    assert calm == [*paper, "--set", "failures.mtbi_s=1e15"]
    words = make_words("m8-tape")
    assert words[words.index("--tape") + 1] == "/a.tape" and "--tokens" not in words and "--set" not in words


def test_every_row_is_compared_with_rows_of_as_many_learners() -> None:
    for row in ROWS.values():
        first = quality.ROWS[row.against]
        assert isinstance(first, Row) and first.method == "data-parallel" and first.learners == row.learners
        assert all(ROWS[other].learners == row.learners for other in row.beside)
        assert len(row.factors) in (0, row.learners)


def test_losses_are_compared_seed_by_seed_and_only_with_a_table_of_equal_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"depth": 10, "digest": "a"}
    reference = tmp_path / "quality.json"
    losses = {"dp": {"0": {"loss": 1.0}, "1": {"loss": 2.0}}}
    reference.write_text(json.dumps({"options": options, "results": losses}))
    table = ProcessTable(tmp_path / "mine.json", options, reference)
    for seed, loss in ((0, 1.01), (1, 2.06), (2, 9.0)):
        table.add_run("m4", seed, {"loss": loss, "seconds": 1.0})
    table.add_run("m4-slow", 1, {"loss": 2.06 * 1.1, "seconds": 1.0})
    told = json.loads((tmp_path / "mine.json").read_text())["compared"]
    assert told["m4"]["above_percent"] == pytest.approx(2.0)
    assert told["m4-slow"]["beside"]["m4"] == pytest.approx(10.0)
    assert capsys.readouterr().out == ""
    apart = ProcessTable(tmp_path / "mine.json", {}, reference)
    assert apart.compare_rows()["m4"]["above_percent"] == pytest.approx(2.0)
    reference.write_text(json.dumps({"options": options | {"digest": "b"}, "results": losses}))
    assert ProcessTable(tmp_path / "mine.json", {}, reference).compare_rows()["m4"]["above_percent"] is None
    assert "other options, {'digest': 'b'}" in capsys.readouterr().out


def test_steps_are_told_with_the_share_that_held_them_up() -> None:
    fast = StepTimes("learner-0", 3, 0.2, [0.1, 0.1], [0.0, 0.01])
    slow = StepTimes("learner-1", 2, 0.2, [0.3], [0.04])
    found = processes.describe_steps([fast, slow])
    assert found["steps"] == {"learner-0": 3, "learner-1": 2}
    assert found["step_ms"] == {"learner-0": 100.0, "learner-1": 300.0}
    assert found["held_share"] == pytest.approx(0.1) and found["held_ms"] == 10.0
    assert found["speed_of_pace"] == pytest.approx(0.8)
    assert processes.describe_steps([StepTimes("learner-0", 2, 0.0, [0.3], [0.04])])["speed_of_pace"] is None


def test_the_h_of_a_tape_is_counted_phase_by_phase_without_the_last_cycle() -> None:
    def merge(number: int, step: float, progress: float) -> MergedRecord:
        return MergedRecord(number, 0, 1, 1, "", (), "", progress=progress, step=step)

    warm = [merge(number, number / 2, 0.1) for number in range(9)]
    later = [merge(9 + number, 4 + 12.0 * number, 0.5) for number in range(5)]
    changes = [ChangedRecord(Settings(learners=2, sync_every=every), {}, "") for every in (2, 24)]
    lines = [changes[0], *warm, changes[1], *later, merge(14, 52.0, 1.0)]
    found = processes.describe_phases(lines, fragments=2)
    assert found == [
        {"sync_every": 2, "effective_h_mean": 1.0, "rounds": 9},
        {"sync_every": 24, "effective_h_mean": 24.0, "rounds": 5},
    ]
