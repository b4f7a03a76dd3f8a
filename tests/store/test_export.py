"""The model comes out of a run's files, whatever state the run is in, and nothing of the run is touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests.store.written import WrittenRun, everything, flip, whole, with_rounds

from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.records import MergedRecord
from atoll.store import rebuild
from atoll.store.cuts import BadCut, folder_of, prune
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.export import export_run
from atoll.store.journal import read
from atoll.store.rebuild import ModelHead, NotKept
from atoll.store.rundir import RunDir


def assert_same(path: Path, run: WrittenRun) -> None:
    """The file holds the run's parameters, bit for bit."""
    due = run.parameters.tensors_by_name()
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == due.keys()
        assert all(file.get_tensor(name).tobytes() == tensor.tobytes() for name, tensor in due.items())


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        found: dict[str, str] = file.metadata()
    return found


def test_a_file_holds_the_newest_version_and_says_what_it_is_of(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.round()
    run.pass_over()
    before = everything(run.dir.path)
    exported = export_run(run.dir.path, tmp_path / "deep" / "small.safetensors")
    assert_same(exported.file, run)
    assert metadata(exported.file) == {"format": "pt", "run": "small", "round": "6", "versions": "2,2,1"}
    assert (exported.run, exported.round, exported.versions) == ("small", 6, (2, 2, 1))
    assert (exported.cut, exported.replayed, exported.remarks) == (4, 1, ())
    assert everything(run.dir.path) == before, "nothing is written into a run"


def test_exports_of_one_model_are_equal_files_whatever_process_writes_them(tmp_path: Path) -> None:
    """safetensors writes metadata in an order that each call draws anew."""
    run = with_rounds(tmp_path / "run", 4)
    for number in range(4):
        export_run(run.dir.path, tmp_path / f"{number}.safetensors")
    assert len({(tmp_path / f"{number}.safetensors").read_bytes() for number in range(4)}) == 1


def test_a_folder_holds_the_model_and_the_settings(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    exported = export_run(run.dir.path, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.toml"}
    assert_same(exported.file, run)
    assert (tmp_path / "out" / "config.toml").read_text() == "seed = 7\n"


def test_a_named_cut_comes_out_as_it_was(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut()
    then = {name: tensor.copy() for name, tensor in run.parameters.tensors_by_name().items()}
    run.round()
    exported = export_run(run.dir.path, tmp_path / "then.safetensors", cut=2)
    with safe_open(exported.file, framework="numpy") as file:
        assert all(np.array_equal(file.get_tensor(name), tensor) for name, tensor in then.items())
    assert (exported.round, exported.versions, exported.replayed) == (2, (1, 1, 0), 0)


def test_a_run_that_has_only_begun_gives_its_first_parameters(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 0)
    exported = export_run(run.dir.path, tmp_path / "first.safetensors")
    assert_same(exported.file, run)
    assert exported.versions == (0, 0, 0)


def test_a_killed_run_gives_all_that_was_durable(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.reign()
    run.round()
    with (run.dir.journal / "segment-000002.log").open("ab") as file:
        file.write(b"half of a recor")
    assert_same(export_run(run.dir.path, tmp_path / "model.safetensors").file, run)


def test_a_damaged_cut_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.round()
    path = folder_of(run.dir.cuts, 4) / "momentum-000.bin"
    flip(path, 1)
    exported = export_run(run.dir.path, tmp_path / "model.safetensors")
    assert_same(exported.file, run)
    assert exported.cut == 0 and exported.replayed == 5
    (remark,) = exported.remarks
    assert remark.startswith(f"cut 4 is passed over: {path} is damaged")


def test_a_cut_that_is_not_complete_serves_as_well(tmp_path: Path) -> None:
    """It is the syncer's part that counts here, and that is whole or not there."""
    run = with_rounds(tmp_path / "run", 3)
    run.syncer_part(3)
    assert export_run(run.dir.path, tmp_path / "model.safetensors").cut == 3


def test_a_cut_of_another_run_is_passed_over(tmp_path: Path) -> None:
    run, other = with_rounds(tmp_path / "run", 2), with_rounds(tmp_path / "other", 3, run="big")
    other.cut()
    shutil.copytree(folder_of(other.dir.cuts, 3), folder_of(run.dir.cuts, 3))
    exported = export_run(run.dir.path, tmp_path / "model.safetensors")
    assert_same(exported.file, run)
    assert exported.remarks == (f"cut 3 is passed over: {folder_of(run.dir.cuts, 3)} is of another run: big",)


def test_rounds_without_outer_gradients_are_not_in_it_and_that_is_said(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut()
    run.round(keep=False)
    exported = export_run(run.dir.path, tmp_path / "model.safetensors")
    assert exported.round == 2
    assert exported.remarks == ("round 2 and later ones kept no outer gradients: the model is older",)


def test_a_run_that_takes_a_cut_meanwhile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_rounds(tmp_path / "run", 4)
    at_cut, cuts = rebuild.load_at_cut, []

    def slow(path: RunDir, number: int) -> ModelHead:
        head = at_cut(path, number)
        if not cuts:
            run.round()
            run.cut()
            run.trim()
            prune(run.dir.cuts, keep=1)
        cuts.append(number)
        return head

    monkeypatch.setattr(rebuild, "load_at_cut", slow)
    assert_same(export_run(run.dir.path, tmp_path / "model.safetensors").file, run)
    assert cuts == [0, 5]


# ---- what cannot be -------------------------------------------------------------------------------------------------


def refused(run: WrittenRun, out: Path, kind: type[AtollError], words: str, cut: int | None = None) -> None:
    with pytest.raises(kind, match=words):
        export_run(run.dir.path, out, cut)
    assert not out.exists() and not list(out.parent.glob(".*.tmp")), "nothing is left behind"


def test_an_outer_gradient_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    run, out = with_rounds(tmp_path / "run", 2), tmp_path / "model.safetensors"
    path = run.dir.journal / "payload-000001-0001.bin"
    flip(path, 3)
    refused(run, out, Corrupt, r"payload-000001-0001\.bin is damaged at byte 0")
    path.unlink()
    refused(run, out, NotKept, r"payload-000001-0001\.bin is missing: it holds the outer gradient of round 0")


def test_a_journal_that_gives_other_values_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.parameters.reset_outer_state(2)
    run.parameters.initial_bytes(2)[0] ^= 1
    run.round()
    refused(run, tmp_path / "model.safetensors", Corrupt, r"round 2 gives fragment 2 the digest .*, its record says")
    last = [record for _, record in read(run.dir.journal, disk=LocalDisk())][-1]
    assert isinstance(last, MergedRecord) and last.round == 2


def test_a_damaged_cut_that_was_named_is_refused(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut()
    flip(folder_of(run.dir.cuts, 2) / "theta-002.bin", 1)
    refused(run, tmp_path / "model.safetensors", BadCut, r"theta-002\.bin is damaged", cut=2)


def test_a_cut_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.cut()
    refused(run, tmp_path / "model.safetensors", BadCut, r"has no cut 7; there are: 0, 2", cut=7)


def test_a_run_without_parameters_is_refused(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    refused(run, tmp_path / "model.safetensors", ConfigError, r"no run with parameters: there is no cuts/ in it")
    run.dir.cuts.mkdir()
    refused(run, tmp_path / "model.safetensors", BadCut, r"holds no cut, so there are no parameters to be had")


def test_what_is_there_is_replaced_only_if_that_was_asked_for(tmp_path: Path) -> None:
    run, out = with_rounds(tmp_path / "run", 1), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already: choose another name, or replace it with --force"):
        export_run(run.dir.path, out)
    assert os.listdir(out) == ["notes.txt"]
    export_run(run.dir.path, out, force=True)
    run.round()
    assert_same(export_run(run.dir.path, out, force=True).file, run)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("inside", ["", "model.safetensors", "exported/here"])
def test_nothing_is_exported_into_the_run_itself(tmp_path: Path, inside: str) -> None:
    run = with_rounds(tmp_path / "run", 1)
    before = everything(run.dir.path)
    with pytest.raises(ConfigError, match="lies in the run's own directory"):
        export_run(run.dir.path, run.dir.path / inside, force=True)
    assert everything(run.dir.path) == before


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 1)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot write .*file/model.safetensors: .*; choose another place"):
        export_run(run.dir.path, tmp_path / "file" / "model.safetensors")
