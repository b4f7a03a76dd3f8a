from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.store import atomic
from atoll.store.atomic import Appender, staged, write_atomic
from atoll.telemetry.events import EventLog, parse


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_atomic(path, b"old")

    def interrupted() -> None:
        with staged(path) as draft:
            draft.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model"]


def test_file_then_folder_are_made_durable_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path.resolve() else "file")
        fsync(descriptor)

    def spy_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_atomic(tmp_path / "x", b"1")
    assert done == ["file", "rename", "folder"]


def test_two_appenders_never_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(name: str) -> None:
        with Appender(path) as sink:
            log = EventLog(sink)
            for number in range(200):
                log.say("x", name * 500, {"number": number})

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = list(parse(path.read_bytes().splitlines(keepends=True)))
    assert len(events) == 400
    assert {event["text"] for event in events} == {"a" * 500, "b" * 500}


def refusing(number: int) -> Callable[[int, bytes], int]:
    """In place of os.write: the disk takes nothing."""

    def write(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_lines_that_find_no_room_are_written_in_order_with_the_next_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sink = Appender(tmp_path / "events.jsonl")
    sink(b"before\n")
    monkeypatch.setattr(os, "write", refusing(number))
    sink(b"one\n")
    sink(b"two\n")
    assert sink.path.read_bytes() == b"before\n"
    monkeypatch.undo()
    sink(b"three\n")
    sink(b"four\n")
    sink.close()
    sink.close()
    assert sink.path.read_bytes() == b"before\none\ntwo\nthree\nfour\n", "each once"


def test_a_short_write_is_taken_back_and_the_whole_line_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left a part of a line in events.jsonl for good."""
    write = os.write
    with Appender(tmp_path / "events.jsonl") as sink:
        sink(b"before\n")
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        sink(b"1234567\n")
        assert sink.path.read_bytes() == b"before\n"
        monkeypatch.undo()
        sink(b"next\n")
    assert sink.path.read_bytes() == b"before\n1234567\nnext\n"


@pytest.fixture
def _shared(tmp_path: Path) -> Iterator[None]:
    """Another process is about to write a line too."""
    with (tmp_path / "events.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        yield


@pytest.mark.usefixtures("_shared")
def test_a_short_write_ends_its_line_and_the_whole_line_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with Appender(tmp_path / "events.jsonl") as sink:
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        sink(b"1234567\n")
        monkeypatch.undo()
        sink(b"next\n")
    assert sink.path.read_bytes() == b"123\n1234567\nnext\n"


@pytest.mark.usefixtures("_shared")
def test_a_torn_line_that_could_not_be_ended_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [3, 0, 0]

    def nearly_full(descriptor: int, data: bytes) -> int:
        if not (left := room.pop(0)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:left])

    with Appender(tmp_path / "events.jsonl") as sink:
        monkeypatch.setattr(os, "write", nearly_full)
        sink(b"1234567\n")
        sink(b"second\n")
        monkeypatch.undo()
        sink(b"third\n")
    assert sink.path.read_bytes() == b"123\n1234567\nsecond\nthird\n"


def test_of_the_lines_kept_for_a_full_disk_the_oldest_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "KEPT_LINES", 3)
    with Appender(tmp_path / "events.jsonl") as sink:
        monkeypatch.setattr(os, "write", refusing(errno.ENOSPC))
        for number in range(10):
            sink(b"%d\n" % number)
        monkeypatch.undo()
        sink(b"room\n")
    assert sink.path.read_bytes() == b"8\n9\nroom\n"


def test_any_other_failure_of_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Appender(tmp_path / "events.jsonl") as sink:
        monkeypatch.setattr(os, "write", refusing(errno.EIO))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            sink(b"line\n")


def test_only_whole_lines_go_into_an_open_file(tmp_path: Path) -> None:
    sink = Appender(tmp_path / "x")
    for line in (b"no end", b"two\nlines\n"):
        with pytest.raises(AssertionError):
            sink(line)
    sink.close()
    with pytest.raises(AssertionError):
        sink(b"closed\n")
