"""Which saved state a learner goes on from, and how much of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.learner.earlier import find_saved_part
from atoll.learner.saved_state import OwnState, RunPlace, Saver, part_name
from atoll.learner.script import FILE
from atoll.learner.snapshot import Snapshot, write
from atoll.learner.trained_model import TorchModel


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_STATE", "ATOLL_EXACT"):
        monkeypatch.delenv(name, raising=False)


def kept(path: Path, value: float) -> Path:
    write(path, Snapshot({"weight": torch.full((3,), value)}, {"place": None}))
    return path


def test_without_a_word_there_is_nothing(tmp_path: Path) -> None:
    assert find_saved_part(None) is None
    assert find_saved_part(tmp_path) is None


def test_what_a_preempted_learner_left_comes_first_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(kept(tmp_path / "cut-000001.safetensors", 1.0)))
    kept(tmp_path / FILE, 2.0)
    for _ in range(2):  # a process that ends before it has joined leaves it to the next
        first = find_saved_part(tmp_path)
        assert first is not None and first.left == tmp_path / FILE
        assert (first.file, first.snapshot.tensors["weight"][0]) == (FILE, 2.0)
    first.left.unlink()
    second = find_saved_part(tmp_path)
    assert second is not None and second.left is None
    assert (second.file, second.snapshot.tensors["weight"][0]) == ("cut-000001.safetensors", 1.0)


def test_one_that_is_damaged_is_kept_aside_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_STATE", "")
    (tmp_path / FILE).write_bytes(b"cut off")
    assert find_saved_part(tmp_path) is None
    assert "cannot read the snapshot" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["preempted.damaged"]
    assert find_saved_part(tmp_path) is None, "and the next one finds nothing"


def test_exactly_is_from_the_cut_whatever_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(kept(tmp_path / "cut-000001.safetensors", 1.0)))
    monkeypatch.setenv("ATOLL_EXACT", "1")
    kept(tmp_path / FILE, 2.0)
    found = find_saved_part(tmp_path)
    assert found is not None and found.exact and found.snapshot.tensors["weight"][0] == 1.0
    assert (tmp_path / FILE).exists()


def test_by_hand_it_goes_on_from_the_newest_part_of_its_own_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Saver(tmp_path).enter_run("r1")
    for cut in (9, 10):
        kept(tmp_path / part_name(cut), float(cut))
    (tmp_path / part_name(11)).write_bytes(b"cut off")
    found = find_saved_part(tmp_path)
    assert found is not None and (found.file, found.run, found.exact) == (part_name(10), "r1", False)
    assert find_saved_part(tmp_path, "r1") is not None
    assert find_saved_part(tmp_path, "r2") is None, "the link names another run"
    monkeypatch.setenv("ATOLL_STATE", "")
    assert find_saved_part(tmp_path) is None, "a supervisor says that it is to take none"


def test_what_was_left_in_another_run_is_told_by_the_folder(tmp_path: Path) -> None:
    """A syncer's address names a folder too: another run may have been there before."""
    Saver(tmp_path).enter_run("r1")
    kept(tmp_path / FILE, 2.0)
    assert find_saved_part(tmp_path, "r2") is None and (tmp_path / FILE).exists()
    found = find_saved_part(tmp_path)
    assert found is not None and (found.file, found.run) == (FILE, "r1")


def test_parts_of_nobody_knows_which_run_are_left_alone(tmp_path: Path) -> None:
    kept(tmp_path / part_name(9), 1.0)
    assert find_saved_part(tmp_path) is None


def test_parameters_come_back_only_exactly_and_chance_only_in_the_end() -> None:
    model = nn.Linear(2, 1)
    own = OwnState(TorchModel(model), {})
    saved = own.begin_capture(RunPlace({"t": 7, "base": []}))[0].finish()
    weight, next_value = model.weight.detach().clone(), torch.rand(1)
    with torch.no_grad():
        model.weight += 1
    assert own.restore_saved(saved) == {"t": 7, "base": []}
    assert torch.rand(1) == next_value and torch.equal(model.weight, weight + 1)
    assert own.restore_exactly(saved) == {"t": 7, "base": []}
    assert torch.rand(1) != next_value and torch.equal(model.weight, weight)
