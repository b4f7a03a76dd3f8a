"""Cuts on disk: whole or not there, and nothing wrong with one stays unseen."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atoll.digests import compute_digest
from atoll.store import cuts
from atoll.store.cuts import (
    FORMAT,
    BadCut,
    CheckedCut,
    LearnerPart,
    Manifest,
    check_cut,
    check_learner_part,
    complete_cuts,
    digest_file,
    folder_of,
    known_cuts,
    open_cut,
    prune,
    read_manifest,
    read_syncer_part,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Rests
from atoll.store.writer_lease import Deposed

ARRAYS = {
    "theta-000": np.arange(3, dtype=np.float32).view(np.uint8),
    "theta-001": np.full(2, -1.5, dtype=np.float32).view(np.uint8),
    "momentum-000": np.zeros(3, dtype=np.float32).view(np.uint8),
}


@dataclass
class Shelf:
    """A folder of cuts, and the learners' beside it."""

    path: Path

    @property
    def cuts(self) -> Path:
        return self.path / "cuts"

    @property
    def learners(self) -> Path:
        return self.path / "learners"

    def part(self, cut: int, run: str = "r1") -> str:
        return write_syncer_part(self.cuts, run, cut, cut, b"state", ARRAYS)

    def saved(self, name: str, cut: int, data: bytes = b"weights") -> LearnerPart:
        path = self.learners / name / f"cut-{cut:06d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return LearnerPart(1, 40, path.name, digest_file(path))

    def whole(self, cut: int) -> Manifest:
        learners = {name: self.saved(name, cut) for name in ("learner-0", "learner-1")}
        manifest = Manifest("r1", cut, cut, self.part(cut), learners, {"learner-2": "it was gone"})
        write_manifest(self.cuts, manifest)
        return manifest

    def check(self, cut: int) -> Manifest:
        return self.checked(cut).manifest

    def checked(self, cut: int) -> CheckedCut:
        return check_cut(self.cuts, self.learners, cut)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # test_atomic.py has it; here it only takes time
    return Shelf(tmp_path)


# ---- whole or not there ----------------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_read(shelf: Shelf) -> None:
    mark = shelf.part(120)
    part, state, arrays = read_syncer_part(shelf.cuts, 120)
    assert (part.run, part.cut, part.round, state) == ("r1", 120, 120, b"state")
    assert arrays.keys() == ARRAYS.keys()
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    assert mark == compute_digest((folder_of(shelf.cuts, 120) / "syncer.json").read_bytes())


def test_a_whole_cut_is_found_well(shelf: Shelf) -> None:
    manifest = shelf.whole(120)
    assert shelf.check(120) == read_manifest(shelf.cuts, 120) == manifest
    assert read_manifest(shelf.cuts, 120).left_out == {"learner-2": "it was gone"}


def test_where_no_cut_was_taken_there_is_none(shelf: Shelf) -> None:
    assert known_cuts(shelf.cuts) == complete_cuts(shelf.cuts) == prune(shelf.cuts, 3) == []


@pytest.mark.parametrize("files", range(len(ARRAYS) + 1))
def test_a_part_that_was_not_finished_is_no_cut(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Its writer dies after so many files of it."""
    shelf.whole(10)
    write, written = cuts._write, list[Path]()

    def dies(path: Path, values: cuts.Bytes, known: str | None, rests: Rests | None) -> cuts.FileEntry:
        if len(written) == files:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, values, known, rests)

    monkeypatch.setattr(cuts, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        shelf.part(20)
    assert known_cuts(shelf.cuts) == [10]
    monkeypatch.setattr(cuts, "_write", write)
    shelf.whole(20)
    assert known_cuts(shelf.cuts) == [20, 10], "tried again, it is there"
    shelf.check(20)


def test_a_writer_that_is_deposed_meanwhile_changes_nothing(shelf: Shelf) -> None:
    manifest = shelf.whole(10)

    def refuse() -> None:
        raise Deposed

    with pytest.raises(Deposed):
        write_syncer_part(shelf.cuts, "r1", 10, 10, b"another state", ARRAYS, refuse)
    assert shelf.check(10) == manifest and [entry.name for entry in shelf.cuts.iterdir()] == ["000010"]


def test_what_a_dead_writer_left_is_removed_with_the_old_cuts(shelf: Shelf) -> None:
    left = shelf.cuts / f"{cuts.DRAFT}20-abc"
    left.mkdir(parents=True)
    (left / "theta-000.bin").write_bytes(b"half of it")
    shelf.whole(10)
    prune(shelf.cuts, 1)
    assert not left.exists() and known_cuts(shelf.cuts) == [10]


def test_a_cut_without_a_manifest_is_known_but_not_complete(shelf: Shelf) -> None:
    shelf.whole(10)
    shelf.part(20)
    assert known_cuts(shelf.cuts) == [20, 10] and complete_cuts(shelf.cuts) == [10]
    with pytest.raises(BadCut, match=r"manifest\.json cannot be read: No such file"):
        shelf.check(20)


def test_cuts_are_ordered_by_their_numbers_not_by_their_names(shelf: Shelf) -> None:
    for cut in (0, 999_990, 1_000_000, 24):
        shelf.part(cut)
    assert known_cuts(shelf.cuts) == [1_000_000, 999_990, 24, 0]


def test_other_things_beside_the_cuts_do_not_matter(shelf: Shelf) -> None:
    shelf.whole(10)
    (shelf.cuts / "notes").mkdir()
    (shelf.cuts / ".000020.tmp").write_bytes(b"")
    assert known_cuts(shelf.cuts) == [10] and prune(shelf.cuts, 1) == []


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_cut_is_found(shelf: Shelf) -> None:
    shelf.whole(120)
    files = [*folder_of(shelf.cuts, 120).glob("*.bin")]
    assert len(files) == len(ARRAYS) + 1
    for path in files:
        for _ in every_flip(path, step=1):
            with pytest.raises(BadCut, match=f"{path.name} is damaged"):
                shelf.check(120)
    for path in shelf.learners.glob("*/*"):
        for _ in every_flip(path, step=1):
            assert [*shelf.checked(120).spoilt] == [path.parent.name]
    assert not shelf.checked(120).spoilt


def test_a_digest_that_is_known_is_written_as_it_is(shelf: Shelf) -> None:
    """What was hashed when it was made is not hashed again: memory that changed since is found by whoever reads it."""
    values = np.ones(8, dtype=np.uint8)
    marks = {"theta-000": compute_digest(values.data), "momentum-000": compute_digest(bytes(8))}
    write_syncer_part(shelf.cuts, "run", 10, 10, b"state", {"theta-000": values}, known=marks)
    assert read_syncer_part(shelf.cuts, 10)[0].list_digests()["theta-000"] == marks["theta-000"]
    write_syncer_part(shelf.cuts, "run", 20, 20, b"state", {"momentum-000": values}, known=marks)
    with pytest.raises(BadCut, match=r"momentum-000\.bin is damaged"):
        read_syncer_part(shelf.cuts, 20)


def test_zeros_are_read_as_they_were_written_and_take_no_room_on_the_disk(shelf: Shelf) -> None:
    zeros = {"momentum-000": np.zeros(1 << 20, dtype=np.uint8), "momentum-001": np.zeros(0, dtype=np.uint8)}
    write_syncer_part(shelf.cuts, "run", 10, 10, b"state", {**ARRAYS, **zeros})
    _, state, read = read_syncer_part(shelf.cuts, 10)
    assert state == b"state"
    assert {name: values.tobytes() for name, values in read.items()} == {
        name: values.tobytes() for name, values in {**ARRAYS, **zeros}.items()
    }
    assert (cuts.folder_of(shelf.cuts, 10) / "momentum-000.bin").stat().st_blocks < 2048


@pytest.mark.parametrize("named", ['"format": 1', '"format": 3', None])
def test_a_cut_of_another_format_is_refused_by_that_name(shelf: Shelf, named: str | None) -> None:
    shelf.part(120)
    table = folder_of(shelf.cuts, 120) / "syncer.json"
    text = table.read_text()
    ours = f'"format": {FORMAT}'
    assert ours in text
    table.write_text(text.replace(ours, named) if named else re.sub(rf",\s*{ours}", "", text))
    for look in (read_syncer_part, open_cut):
        with pytest.raises(BadCut, match=r"was written by another version of Atoll: go on with the run with that"):
            look(shelf.cuts, 120)


def test_a_flipped_bit_of_the_table_is_found_by_the_manifest(shelf: Shelf) -> None:
    shelf.whole(120)
    for _ in every_flip(folder_of(shelf.cuts, 120) / "syncer.json", step=7):
        with pytest.raises(BadCut, match=r"syncer\.json is not the one that the manifest of cut 120 names"):
            shelf.check(120)


def test_a_table_with_a_flipped_bit_never_gives_other_values(shelf: Shelf) -> None:
    """Without a manifest: a syncer comes back from its own part alone."""
    shelf.part(120)
    found = tries = 0
    for _ in every_flip(folder_of(shelf.cuts, 120) / "syncer.json", step=3):
        tries += 1
        try:
            _, state, arrays = read_syncer_part(shelf.cuts, 120)
        except BadCut:
            found += 1
        else:
            assert state == b"state" and all(arrays[name].tobytes() == ARRAYS[name].tobytes() for name in arrays)
    assert found > tries // 2


def test_a_manifest_with_a_flipped_bit_never_puts_other_files_back(shelf: Shelf) -> None:
    parts = {name: (part.file, part.digest) for name, part in shelf.whole(120).learners.items()}
    found = tries = 0
    for _ in every_flip(folder_of(shelf.cuts, 120) / "manifest.json", step=3):
        tries += 1
        try:
            manifest = shelf.check(120)
        except BadCut:
            found += 1
        else:
            kept = {name: (part.file, part.digest) for name, part in manifest.learners.items()}
            assert kept.items() <= parts.items()
            found += kept != parts
    assert found > tries // 2


@pytest.mark.parametrize("name", ["theta-001.bin", "state.bin"])
def test_what_is_shorter_longer_or_missing_is_named(shelf: Shelf, name: str) -> None:
    shelf.part(120)
    path = folder_of(shelf.cuts, 120) / name
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"\0", b""):
        path.write_bytes(wrong)
        with pytest.raises(BadCut, match=f"{name} is damaged: {len(wrong)} bytes lie there"):
            read_syncer_part(shelf.cuts, 120)
    path.unlink()
    with pytest.raises(BadCut, match=f"{name} cannot be read: No such file"):
        read_syncer_part(shelf.cuts, 120)


def test_a_table_without_the_state_is_no_part(shelf: Shelf) -> None:
    shelf.part(120)
    path = folder_of(shelf.cuts, 120) / "syncer.json"
    table = msgspec.json.decode(path.read_bytes())
    del table["files"]["state.bin"]
    path.write_bytes(msgspec.json.encode(table))
    with pytest.raises(BadCut, match=r"syncer\.json names no state\.bin"):
        read_syncer_part(shelf.cuts, 120)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"run": 1}', b"\xff\xfe", b'{"run": "r1", "more": 1}'])
def test_a_table_that_is_none_is_damaged(shelf: Shelf, text: bytes) -> None:
    shelf.part(120)
    (folder_of(shelf.cuts, 120) / "syncer.json").write_bytes(text)
    with pytest.raises(BadCut, match=r"syncer\.json is damaged"):
        read_syncer_part(shelf.cuts, 120)


def test_the_manifest_of_another_syncers_part_is_refused(shelf: Shelf) -> None:
    manifest = shelf.whole(120)
    write_syncer_part(shelf.cuts, "r1", 120, 120, b"another state", ARRAYS)
    read_syncer_part(shelf.cuts, 120)
    assert complete_cuts(shelf.cuts) == [], "a part that is written anew has no manifest yet"
    write_manifest(shelf.cuts, manifest)
    with pytest.raises(BadCut, match=r"syncer\.json is not the one that the manifest of cut 120 names"):
        shelf.check(120)


def test_a_manifest_whose_syncers_part_is_gone_is_no_cut(shelf: Shelf) -> None:
    shelf.whole(120)
    (folder_of(shelf.cuts, 120) / "syncer.json").unlink()
    assert complete_cuts(shelf.cuts) == []
    with pytest.raises(BadCut, match=r"syncer\.json cannot be read: No such file"):
        shelf.check(120)


def test_a_learners_file_that_is_missing_costs_that_learner_alone(shelf: Shelf) -> None:
    whole = shelf.whole(120)
    path = shelf.learners / "learner-1" / "cut-000120.safetensors"
    path.unlink()
    checked = shelf.checked(120)
    missing = f"{path} is missing: the cut names it as the state of learner-1 (learners started by hand keep theirs)"
    assert checked.spoilt == {"learner-1": missing}
    assert checked.list_remarks() == [f"cut 120 is taken without the state of learner-1: {missing}"]
    assert checked.manifest.learners == {"learner-0": whole.learners["learner-0"]}
    assert checked.manifest.left_out == {"learner-2": "it was gone", "learner-1": missing}


@pytest.mark.parametrize("file", ["nothing", "../secret", "", "x" * 1000, "a-folder", "cut-000120.safetensors"])
def test_whatever_a_learner_says_that_it_saved_the_others_keep_their_state(shelf: Shelf, file: str) -> None:
    whole = shelf.whole(120)
    (shelf.learners / "rogue" / "a-folder").mkdir(parents=True)
    shelf.saved("rogue", 120)
    learners = {**whole.learners, "rogue": LearnerPart(1, 40, file, "0" * 32)}
    write_manifest(shelf.cuts, msgspec.structs.replace(whole, learners=learners))
    checked = shelf.checked(120)
    assert checked.spoilt.keys() == {"rogue"} and checked.manifest.learners == whole.learners


def test_a_learners_file_that_is_another_is_named(shelf: Shelf) -> None:
    part = shelf.saved("learner-0", 120)
    assert check_learner_part(shelf.learners, "learner-0", part) == shelf.learners / "learner-0" / part.file
    shelf.saved("learner-0", 120, b"others")
    with pytest.raises(BadCut, match=r"cut-000120\.safetensors is damaged: its digest"):
        check_learner_part(shelf.learners, "learner-0", part)


@pytest.mark.parametrize("file", ["../secret", "/etc/hostname", "..", ".", "", "sub/file", ".hidden"])
def test_a_name_that_leads_out_of_the_learners_folder_is_refused(shelf: Shelf, file: str) -> None:
    """It is a peer's word."""
    part = shelf.saved("learner-0", 120)
    (shelf.learners / "secret").write_bytes(b"secret")
    with pytest.raises(BadCut, match="is no name of a file"):
        check_learner_part(shelf.learners, "learner-0", LearnerPart(1, 40, file, compute_digest(b"secret")))
    with pytest.raises(BadCut, match="is no name of a file"):
        check_learner_part(shelf.learners, file, part)


# ---- how many stay ---------------------------------------------------------------------------------------------------


def test_the_newest_complete_cuts_are_kept_and_what_lies_before_them_goes(shelf: Shelf) -> None:
    for cut in (0, 10, 30, 40, 60):
        shelf.whole(cut)
    for cut in (20, 50, 70):
        shelf.part(cut)
    folder_of(shelf.cuts, 5).mkdir()
    assert prune(shelf.cuts, 3) == [0, 5, 10, 20]
    assert known_cuts(shelf.cuts) == [70, 60, 50, 40, 30]
    assert complete_cuts(shelf.cuts) == [60, 40, 30]
    assert prune(shelf.cuts, 3) == []


def test_where_none_is_complete_nothing_goes(shelf: Shelf) -> None:
    for cut in (0, 10, 20):
        shelf.part(cut)
    assert prune(shelf.cuts, 1) == []
    assert known_cuts(shelf.cuts) == [20, 10, 0]


def test_fewer_than_are_kept_all_stay(shelf: Shelf) -> None:
    for cut in (10, 20):
        shelf.whole(cut)
    assert prune(shelf.cuts, 3) == [] and complete_cuts(shelf.cuts) == [20, 10]


def every_flip(path: Path, step: int) -> Iterator[None]:
    """Every `step`-th bit of the file, flipped and put back."""
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), step):
        put(path, bit // 8, data[bit // 8] ^ 1 << bit % 8)
        yield
        put(path, bit // 8, data[bit // 8])


def put(path: Path, offset: int, byte: int) -> None:
    """In place: to write a file anew takes far longer."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([byte]))


def test_a_cut_that_is_being_deleted_is_never_half_there(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may die in the middle of it: what is left has no name that anybody looks for, and goes later."""
    for cut in (10, 20):
        shelf.whole(cut)
    with monkeypatch.context() as patch:
        patch.setattr(cuts.shutil, "rmtree", lambda path: (path / "state.bin").unlink())
        assert prune(shelf.cuts, 1) == [10]
    assert known_cuts(shelf.cuts) == complete_cuts(shelf.cuts) == [20]
    assert prune(shelf.cuts, 1) == [] and len(list(shelf.cuts.iterdir())) == 1
