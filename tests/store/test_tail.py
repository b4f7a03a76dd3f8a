"""The mean of the last versions: the same from every cut, known to the journal, and verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file
from tests.store.written import P, WrittenRun, everything, well, with_rounds, wrong

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import assemble_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import TailRecord
from atoll.store.export import export_run
from atoll.store.rebuild import NotKept
from atoll.store.rundir import read_model_facts, save_model
from atoll.store.tail import TailModel, average_tail


class Seen:
    """What each version of a run was, as it was made."""

    def __init__(self, run: WrittenRun) -> None:
        self.run = run
        self.versions: list[dict[int, FloatArray]] = [{} for _ in range(P)]
        self.note()

    def note(self) -> None:
        for fragment, buffer in enumerate(self.run.parameters.committed_buffers()):
            self.versions[fragment].setdefault(buffer.version, buffer.values.copy())

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.run.round()
            self.note()

    def mean(self, first: tuple[int, ...], last: tuple[int, ...]) -> dict[str, FloatArray]:
        spans = zip(self.versions, first, last, strict=True)
        taken = [[held[version].astype(np.float64) for version in range(a, b + 1)] for held, a, b in spans]
        means = [np.mean(one, axis=0).astype(np.float32) for one in taken]
        return assemble_tensors(self.run.parameters.plan, means)


def watched(path: Path, rounds: int = 0, **given: str) -> tuple[WrittenRun, Seen]:
    run = with_rounds(path, 0, **given)
    seen = Seen(run)
    seen.rounds(rounds)
    return run, seen


def write_tail(run: WrittenRun, cycles: int) -> TailModel:
    """As a syncer does at the end of a run."""
    tail = average_tail(run.dir, cycles)
    run.write(tail.record)
    save_model(run.dir.tail_model, tail.tensors_by_name(), tail.facts())
    return tail


def assert_holds(path: Path, due: dict[str, FloatArray]) -> None:
    found = load_file(path)
    assert found.keys() == due.keys()
    for name, tensor in due.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize("version_codec", ["fp32", "int8"])
def test_export_writes_the_mean_of_the_last_versions_beside_the_newest(tmp_path: Path, version_codec: str) -> None:
    run, seen = watched(tmp_path / "run", 6, version_codec=version_codec)
    run.cut()
    seen.rounds(5)
    before = everything(run.dir.path)
    done = export_run(run.dir.path, tmp_path / "out" / "small.safetensors", tail=2)
    assert done.tail == tmp_path / "out" / "small-tail.safetensors" and not done.remarks
    assert_holds(done.tail, seen.mean((3, 3, 2), (4, 4, 3)))
    facts = {"run": "small", "round": "11", "versions": "4,4,3", "averaged_from": "3,3,2"}
    assert facts.items() <= read_model_facts(done.tail).items()
    assert_holds(done.file, dict(run.parameters.tensors_by_name()))
    assert everything(run.dir.path) == before, "nothing is written into a run"


def test_a_folder_gets_both_files(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 6)
    export_run(run.dir.path, tmp_path / "out", tail=2)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "model-tail.safetensors", "config.toml"}
    with pytest.raises(ConfigError, match="is there already"):
        export_run(run.dir.path, tmp_path / "out" / "model.safetensors", tail=2)


def test_the_second_file_is_not_replaced_either(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 6)
    (tmp_path / "m-tail.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"m-tail\.safetensors is there already"):
        export_run(run.dir.path, tmp_path / "m.safetensors", tail=2)
    assert not (tmp_path / "m.safetensors").exists()


def test_the_mean_is_the_same_from_every_cut_that_goes_back_far_enough(tmp_path: Path) -> None:
    """Through a killed syncer, a round that is passed over, other outer settings and an outer step that overflows."""
    run, seen = watched(tmp_path / "run", 4)
    run.cut()
    seen.rounds(2)
    run.reign()
    run.pass_over()
    seen.rounds(2)
    run.overflow()
    run.set_outer(lr=0.5)
    seen.rounds(4)
    first = average_tail(run.dir, 2)
    run.cut()
    again = average_tail(run.dir, 2)
    assert first.record == again.record and first.record.last == tuple(run.history.versions)
    due = seen.mean(first.record.first, first.record.last)
    for name, tensor in first.tensors_by_name().items():
        np.testing.assert_array_equal(tensor, due[name])


def test_version_0_is_not_averaged_nor_what_was_rolled_back(tmp_path: Path) -> None:
    run, seen = watched(tmp_path / "run", 5)
    assert average_tail(run.dir, 9).record.first == (1, 1, 1), "there are versions 2, 2, 1"
    run.score(1.0)
    run.cut()
    seen.rounds(4)
    run.roll_back(5)
    seen.note()
    seen.rounds(3)
    versions = tuple(run.history.versions)
    tail = average_tail(run.dir, 9)
    assert tail.record.last == versions and tail.record.first == tuple(version - 1 for version in versions)
    for name, tensor in seen.mean(tail.record.first, tail.record.last).items():
        np.testing.assert_array_equal(tail.tensors_by_name()[name], tensor)


def test_fewer_versions_are_averaged_where_outer_gradients_are_trimmed_and_a_remark_says_so(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    run.cut()
    run.trim()
    with pytest.raises(NotKept, match=r"no fragment of .* has two versions that can be made again"):
        average_tail(run.dir, 4)
    for _ in range(4):
        run.round()
    tail = average_tail(run.dir, 4)
    assert (tail.record.first, tail.record.last) == ((3, 3, 3), (5, 4, 4))
    assert "averaged are 2 versions of some fragment where 4 were asked for" in tail.remarks[0]


def test_one_cycle_is_no_mean(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 4)
    with pytest.raises(ConfigError, match="the mean of 1 cycles is no mean: average over 2 or more"):
        export_run(run.dir.path, tmp_path / "out.safetensors", tail=1)


# ---- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version_codec", ["fp32", "topk"])
def test_verify_makes_the_mean_again(tmp_path: Path, version_codec: str) -> None:
    run, _ = watched(tmp_path / "run", 6, version_codec=version_codec)
    run.cut()
    for _ in range(6):
        run.round()
    run.end()
    write_tail(run, 3)
    assert not well(run).remarks


def test_another_mean_than_the_record_says_is_named(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    record = average_tail(run.dir, 2).record
    run.write(replace(record, digests=("0" * 32, *record.digests[1:])))
    assert "the last versions have another mean than the record of the averaged model says" in wrong(run)


def test_a_file_with_other_values_is_named(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    tail = write_tail(run, 2)
    save_model(run.dir.tail_model, run.parameters.tensors_by_name(), tail.facts())
    assert "model-tail.safetensors is not the mean that the journal tells of: fragment 0 has other values" in wrong(run)


def test_a_file_that_the_journal_does_not_know_is_named(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    tail = average_tail(run.dir, 2)
    save_model(run.dir.tail_model, tail.tensors_by_name(), tail.facts())
    assert "model-tail.safetensors is not known to the journal" in wrong(run)


def test_the_file_of_an_earlier_end_is_still_known_when_the_next_was_not_written(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    write_tail(run, 2)
    for _ in range(3):
        run.round()
    run.write(average_tail(run.dir, 2).record)  # and killed before the file
    assert not well(run).remarks


def test_once_its_outer_gradients_are_gone_the_file_is_held_against_the_record(tmp_path: Path) -> None:
    run, _ = watched(tmp_path / "run", 9)
    tail = write_tail(run, 2)
    run.cut()
    for payload in run.dir.journal.glob("payload-*.bin"):
        payload.unlink()
    assert well(run).remarks == ("the averaged model cannot be made again: its outer gradients are trimmed",)
    save_model(run.dir.tail_model, run.parameters.tensors_by_name(), tail.facts())
    assert "is not the mean that the journal tells of" in wrong(run)


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ((1, 1), (2, 2), "a mean is written of 2 fragments, the run has 3"),
        ((2, 1, 1), (9, 1, 1), "versions 2 to 9 of fragment 0, which is at version 2"),
        ((2, 1, 1), (1, 1, 1), "versions 2 to 1 of fragment 0"),
    ],
)
def test_a_record_of_versions_that_are_not_there_is_named(
    tmp_path: Path, first: tuple[int, ...], last: tuple[int, ...], said: str
) -> None:
    run, _ = watched(tmp_path / "run", 5)
    run.raw(TailRecord(2, first, last, ("",) * len(last)))
    assert said in wrong(run)
