from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.store.faulty import FOLDER, FaultyDisk

from atoll.store import disk as module
from atoll.store.disk import (
    Disk,
    DiskFailed,
    GrowingFile,
    LocalDisk,
    NoRoom,
    Rests,
    delete,
    make_durable,
    not_written,
    reading,
    sync_between,
)


@pytest.fixture(params=["local", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    """A disk and a folder on it: the disk of the tests keeps the same contract as the real one."""
    return (LocalDisk(), tmp_path) if request.param == "local" else (FaultyDisk(), FOLDER)


def test_what_is_appended_is_read_back_from_any_byte(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    file = disk.create(folder / "a")
    assert file.write(b"one ") == 4
    assert file.write(memoryview(b"two")) == 3
    file.datasync()
    disk.sync(folder)
    assert disk.read(folder / "a", 0, 100) == b"one two"
    assert disk.read(folder / "a", 4, 2) == b"tw"
    assert disk.read(folder / "a", 50, 2) == b""
    assert disk.size(folder / "a") == 7
    assert disk.names(folder) == ["a"]
    file.close()
    file.close()


def test_a_name_is_made_once(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    disk.create(folder / "a").close()
    with pytest.raises(FileExistsError):
        disk.create(folder / "a")


def test_writing_goes_on_at_the_end_of_a_file_that_was_cut(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    file = disk.create(folder / "a")
    file.write(b"kept and torn")
    file.truncate(5)
    file.write(b"again")
    assert disk.read(folder / "a", 0, 100) == b"kept again"
    file.close()


def test_a_removed_file_is_gone(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    disk.create(folder / "a").close()
    disk.remove(folder / "a")
    assert disk.names(folder) == []
    for ask in (disk.remove, disk.size, lambda path: disk.read(path, 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask(folder / "a")


def test_deleting_what_is_gone_is_no_failure(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    delete(folder / "a", disk)
    disk.create(folder / "a").close()
    delete(folder / "a", disk)
    assert disk.names(folder) == []


def test_a_power_cut_forgets_bytes_and_names_that_were_not_synced() -> None:
    disk = FaultyDisk()
    known = disk.create(FOLDER / "known")
    known.write(b"durable")
    known.datasync()
    disk.sync(FOLDER)
    known.write(b", not")
    disk.create(FOLDER / "unknown").datasync()
    disk.crash()
    assert disk.names(FOLDER) == ["known"]
    assert disk.bytes_of("known") == b"durable"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_failure(number: int) -> None:
    error = not_written(OSError(number, os.strerror(number)), Path("run/journal/x"))
    assert isinstance(error, NoRoom)
    assert "run/journal/x" in str(error) and "make room" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.EEXIST])
def test_anything_else_is(number: int) -> None:
    error = not_written(OSError(number, os.strerror(number)), Path("run/journal/x"))
    assert isinstance(error, DiskFailed)
    assert "run/journal/x" in str(error) and "start the syncer again" in str(error) and "\n" not in str(error)


def test_what_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match=r"cannot read .*nowhere: No such file"), reading(tmp_path / "nowhere"):
        LocalDisk().names(tmp_path / "nowhere")
    with pytest.raises(DiskFailed, match=r"cannot make durable .*nowhere"):
        make_durable(tmp_path / "nowhere", LocalDisk())
    with pytest.raises(DiskFailed, match="cannot delete"):
        delete(tmp_path, LocalDisk())


def test_a_growing_file_takes_all_bytes_however_few_at_a_time() -> None:
    disk = FaultyDisk()
    disk.most_bytes = 3
    file = GrowingFile(FOLDER / "a", disk)
    file.write(b"longer than three")
    assert disk.bytes_of("a") == b"longer than three"
    assert file.size == 17


def test_a_growing_file_is_cut_back_to_what_counts_and_durably() -> None:
    disk = FaultyDisk()
    file = GrowingFile(FOLDER / "a", disk)
    file.write(b"counts")
    file.datasync()
    file.mark_kept()
    disk.sync(FOLDER)
    disk.room_bytes = 4
    with pytest.raises(NoRoom):
        file.write(b", does not")
    assert disk.bytes_of("a") == b"counts, do"
    disk.calls.clear()
    file.cut_back()
    assert disk.calls == [("sync", "a")]
    assert disk.bytes_of("a") == b"counts" and file.size == 6


def test_a_growing_file_syncs_only_what_is_new() -> None:
    disk = FaultyDisk()
    file = GrowingFile(FOLDER / "a", disk)
    file.write(b"x")
    file.datasync()
    file.datasync()
    assert disk.calls == [("write", "a"), ("sync", "a")]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be told")
def test_a_system_that_takes_no_advice_has_not_failed_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    file = LocalDisk().create(tmp_path / "payload")
    file.write(bytes(2 << 20))
    file.datasync()
    file.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be told")
def test_what_is_durable_and_large_is_not_kept_in_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("atoll.store.disk.datasync", lambda descriptor: done.append("synced"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: done.append("dropped"))
    file = LocalDisk().create(tmp_path / "payload")
    for size in (1000, 1 << 20, 1000):
        file.write(bytes(size))
        file.datasync()
    file.close()
    assert done == ["synced", "synced", "dropped", "synced"]
    assert (tmp_path / "payload").stat().st_size == 2000 + (1 << 20)


# ---- gigabytes in the background ------------------------------------------------------------------------------------


class Noted(Rests):
    """Takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[float] = []

    def _wait(self, seconds: float) -> None:
        self.rests.append(seconds)


def write_pieces(path: Path, pieces: list[bytes], rests: Rests | None) -> None:
    with path.open("wb") as file:
        for piece in sync_between(file, map(memoryview, pieces), rests):
            file.write(piece)


@pytest.fixture
def slow_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A sync takes three seconds of a clock that only syncs move; the size of the file at each."""
    sizes: list[int] = []

    def sync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(module, "datasync", sync)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 3.0 * len(sizes)))
    return sizes


def test_a_rest_is_as_long_as_the_sync_before_it(
    tmp_path: Path, slow_syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2 << 20)
    rests = Noted()
    write_pieces(tmp_path / "a", [bytes(1 << 20)] * 5, rests)
    assert slow_syncs == [2 << 20, 4 << 20, 5 << 20], "the last one too, though it is no whole piece"
    assert rests.rests == [3.0, 3.0, 3.0]


def test_a_file_rests_no_longer_than_its_cut_can_wait(
    tmp_path: Path, slow_syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)
    rests = Noted()
    write_pieces(tmp_path / "a", [bytes(1 << 20)] * 9, rests)
    assert sum(rests.rests) == module.MOST_REST_S


def test_small_files_and_those_that_are_waited_for_rest_not_at_all(tmp_path: Path, slow_syncs: list[int]) -> None:
    rests = Noted()
    write_pieces(tmp_path / "a", [b"small"], rests)
    write_pieces(tmp_path / "b", [bytes(1 << 20)], None)
    assert len(slow_syncs) == 2 and rests.rests == []


def test_a_rest_ends_when_somebody_waits_for_the_file() -> None:
    rests = Rests()
    writer = threading.Thread(target=rests.rest, args=(module.MOST_REST_S,))
    began = time.monotonic()
    writer.start()
    rests.end()
    writer.join()
    rests.rest(module.MOST_REST_S)
    assert time.monotonic() - began < module.MOST_REST_S
