"""A learner's part of a cut is written beside the training, one at a time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.learner import saved_state
from atoll.learner.capture import BegunSnapshot
from atoll.learner.folder import list_parts, read_run
from atoll.learner.saved_state import Saver, part_name
from atoll.learner.script import FILE
from atoll.learner.snapshot import Snapshot, read
from atoll.learner.state import begin_capture
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner.effects import Saved
from atoll.store.cuts import digest_file
from atoll.store.disk import MOST_REST_S, Rests

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def copied(value: float = 1.0) -> BegunSnapshot:
    return begin_capture(nn.ReLU(), extras={"weight": Weight(value)}, rng=False)


class Weight:
    def __init__(self, value: float) -> None:
        self._value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((3,), self._value)}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        raise AssertionError("nobody loads it")


def saved(saver: Saver, cut: int, value: float = 1.0, kept: tuple[int, ...] = ()) -> Saved:
    """One part, written to the end."""
    saver.save(cut, 10 * cut, copied(value), kept)
    saver.finish(WAIT_S)
    (result,) = saver.results()
    return result


class Slow:
    """In place of the disk: a write that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.rests: Rests | None = None

    def __call__(self, path: Path, snapshot: Snapshot, rests: Rests | None = None) -> str:
        self.rests = rests
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        return "digest"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    disk = Slow()
    monkeypatch.setattr(saved_state, "write", disk)
    yield disk
    disk.may_end.set()


def test_what_is_said_of_a_part_is_what_lies_there(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "learner-0")
    result = saved(saver, 120, 2.5)
    path = tmp_path / "learner-0" / "cut-000120.safetensors"
    assert result == Saved(120, 1200, path.name, digest_file(path))
    assert torch.equal(read(path).tensors["extra/weight/weight"], torch.full((3,), 2.5))
    assert saver.results() == [], "told once"


def test_training_goes_on_while_a_part_is_written(tmp_path: Path, slow: Slow) -> None:
    saver = Saver(tmp_path)
    saver.save(120, 7, copied())
    assert slow.begun.wait(WAIT_S)
    assert saver.busy and saver.results() == [], "it came back, and the write is not done"
    slow.may_end.set()
    saver.finish(WAIT_S)
    assert not saver.busy and saver.results() == [Saved(120, 7, "cut-000120.safetensors", "digest")]


@pytest.mark.parametrize("before", [True, False])
def test_a_learner_that_makes_no_more_steps_writes_without_rests(tmp_path: Path, slow: Slow, before: bool) -> None:
    saver = Saver(tmp_path)
    if before:
        saver.hurry()
    saver.save(1, 10, copied())
    assert slow.begun.wait(WAIT_S) and slow.rests is not None
    began = time.monotonic()
    saver.hurry()
    slow.rests.rest(MOST_REST_S)
    assert time.monotonic() - began < MOST_REST_S
    slow.may_end.set()
    saver.finish(WAIT_S)


def test_while_one_part_is_written_there_is_no_other(tmp_path: Path, slow: Slow) -> None:
    saver = Saver(tmp_path)
    assert saver.reason_not_to() == ""
    saver.save(120, 7, copied())
    assert slow.begun.wait(WAIT_S)
    assert saver.reason_not_to() == "its last part is still being written"
    with pytest.raises(AssertionError):
        saver.save(140, 8, copied())
    slow.may_end.set()
    saver.finish(WAIT_S)
    assert saver.reason_not_to() == ""


def test_without_a_folder_nothing_is_saved_and_the_reason_says_why() -> None:
    assert Saver(None).reason_not_to() == "it has no folder to save to (atoll learn --folder)"


def test_what_was_refused_is_told_with_its_reason(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.refuse(120, 7, "its last part is still being written")
    saver.refuse(140, 9, "again")
    assert saver.results() == [
        Saved(120, 7, reason="its last part is still being written"),
        Saved(140, 9, reason="again"),
    ]
    assert saver.results() == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ConfigError("the header would be too large")]
)
def test_a_part_that_cannot_be_written_is_a_reason_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(path: Path, snapshot: Snapshot, rests: Rests) -> str:
        raise error

    saver = Saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saved_state, "write", fails)
        result = saved(saver, 120)
    assert (result.cut, result.t, result.file, result.digest) == (120, 1200, "", "")
    assert result.reason == f"its part could not be written: {error}"
    assert saved(saver, 140).reason == "", "the next one may find room"


def test_a_folder_that_cannot_be_made_is_a_reason_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "its part could not be written: " in saved(Saver(tmp_path / "file"), 120).reason


def test_parts_of_the_cuts_that_the_run_keeps_stay_however_many_cuts_come_to_nothing(tmp_path: Path) -> None:
    """The syncer died again and again in the middle of a cut, and the part of the last complete one was deleted."""
    saver = Saver(tmp_path)
    for cut in range(20, 200, 20):
        saved(saver, cut, kept=tuple(one for one in (40, 60) if one < cut))
    assert sorted(path.name for path in tmp_path.glob("cut-*")) == [part_name(cut) for cut in (40, 60, 160, 180)]


def test_only_the_newest_parts_are_kept(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    for cut in range(20, 200, 20):
        assert saved(saver, cut).reason == ""
    assert sorted(path.name for path in tmp_path.glob("cut-*")) == [part_name(cut) for cut in (160, 180)]
    assert other.exists()


def test_the_newest_is_the_one_of_the_highest_number_also_past_a_million(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    for cut in range(999_940, 1_000_041, 20):
        assert saved(saver, cut).reason == ""
        assert (tmp_path / part_name(cut)).exists(), f"{cut} was just written"
    assert {path.name for path in tmp_path.glob("cut-*")} == {part_name(cut) for cut in (1_000_020, 1_000_040)}


def test_a_part_that_fails_leaves_the_earlier_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path)
    for cut in (20, 40, 60, 80):
        saved(saver, cut)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(path: Path, snapshot: Snapshot) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saved_state, "write", fails)
    assert saved(saver, 100).reason
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_to_finish_is_to_wait_for_the_write_but_not_for_ever(tmp_path: Path, slow: Slow) -> None:
    saver = Saver(tmp_path)
    saver.finish(0.0)
    saver.save(120, 7, copied())
    saver.finish(0.0)
    assert saver.busy
    slow.may_end.set()
    saver.finish(WAIT_S)
    assert not saver.busy


def test_the_parts_that_its_last_lives_went_on_from_stay(tmp_path: Path) -> None:
    cut = 0
    for _ in range(5):
        saver = Saver(tmp_path)
        saver.note_life(part_name(cut))  # before the first there is none
        for _ in range(4):
            cut += 20
            saved(saver, cut)
    assert [part.name for part in list_parts(tmp_path)] == [part_name(cut) for cut in (160, 240, 320, 380, 400)]


def test_why_no_part_was_taken_is_told_with_the_results(tmp_path: Path) -> None:
    def cannot() -> BegunSnapshot:
        raise ConfigError("'scaler' is a generator, which a snapshot cannot hold")

    saver = Saver(tmp_path)
    saver.take_part(1, 10, cannot, ())
    Saver(None).take_part(1, 10, cannot, ())
    assert saver.results() == [Saved(1, 10, reason="'scaler' is a generator, which a snapshot cannot hold")]
    saver.take_part(2, 20, copied, ())
    saver.finish(WAIT_S)
    assert [(result.cut, result.file) for result in saver.results()] == [(2, part_name(2))]


def test_a_state_for_later_needs_a_folder(tmp_path: Path) -> None:
    assert not Saver(None).save_for_later(copied)
    assert Saver(tmp_path / "learner-0").save_for_later(lambda: copied(3.0))
    assert read(tmp_path / "learner-0" / FILE).tensors["extra/weight/weight"][0] == 3.0


def test_parts_of_another_run_are_set_aside_when_a_run_is_entered(tmp_path: Path) -> None:
    """Cuts of every run have the same numbers; the second run on an address deleted the parts of the first."""
    saver = Saver(tmp_path)
    part, left = tmp_path / "cut-000070.safetensors", tmp_path / "preempted.safetensors"
    saver.enter_run("first")
    for file in (part, left):
        file.touch()
    saver.enter_run("first")
    assert part.exists() and read_run(tmp_path) == "first"
    saver.enter_run("second")
    assert not part.exists() and not left.exists() and read_run(tmp_path) == "second"
    aside = tmp_path / "first"
    assert (aside / part.name).exists() and (aside / left.name).exists() and read_run(aside) == "first"


def test_parts_in_a_folder_that_says_nothing_of_a_run_stay(tmp_path: Path) -> None:
    part = tmp_path / "cut-000070.safetensors"
    part.touch()
    Saver(tmp_path).enter_run("first")
    assert part.exists() and list_parts(tmp_path) == [part]


def test_without_a_folder_a_run_is_entered_all_the_same(tmp_path: Path) -> None:
    Saver(None).enter_run("first")
    (tmp_path / "file").touch()
    Saver(tmp_path / "file" / "learner-0").enter_run("first")
