"""Events in several parts: every line once, whoever writes and reads while a part is moved away."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from atoll.observe.tail import EventTail
from atoll.store.atomic import Appender
from atoll.store.event_parts import begin_part, events_size, list_parts, read_events, read_lines

SMALL = 2000


def line(writer: int, number: int) -> bytes:
    return msgspec.json.encode({"at": float(number), "kind": "note", "writer": writer, "number": number}) + b"\n"


def write(events: Path, writer: int, count: int) -> None:
    with Appender(events, SMALL, begin_part) as sink:
        for number in range(count):
            sink(line(writer, number))


def test_lines_go_on_in_a_new_file_and_readers_see_one(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    write(events, 0, 200)
    parts = list_parts(events)
    assert len(parts) > 4 and [path.parent.name for _, path in parts[:-1]] == ["events"] * (len(parts) - 1)
    assert read_lines(events) == [line(0, number) for number in range(200)]
    whole = b"".join(line(0, number) for number in range(200))
    assert events_size(events) == len(whole) and read_events(events) == whole
    assert read_events(events, 1990, 4000) == whole[1990:5990]
    assert [one["number"] for one in EventTail(events).new_events()] == list(range(200))


def test_a_follower_sees_every_line_once_while_several_write_and_parts_are_moved(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    tail, seen = EventTail(events), list[tuple[int, int]]()
    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, events, writer, 300) for writer in range(3)]
        while not all(one.done() for one in writers):
            seen += [(event["writer"], event["number"]) for event in tail.new_events()]
        for one in writers:
            one.result()
    seen += [(event["writer"], event["number"]) for event in tail.new_events()]
    assert sorted(seen) == [(writer, number) for writer in range(3) for number in range(300)]
    assert len(list_parts(events)) > 10


def test_a_process_that_has_the_file_open_writes_into_the_new_one(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    script = (
        "import sys; from pathlib import Path; from atoll.store.atomic import Appender\n"
        "sink = Appender(Path(sys.argv[1]))\n"
        "for line in sys.stdin.buffer: sink(line); print(flush=True)\n"
    )
    told = [line(1, 0), line(1, 1)]
    with subprocess.Popen([sys.executable, "-c", script, str(events)], stdin=-1, stdout=-1) as other:
        assert other.stdin is not None and other.stdout is not None
        for one in told:
            other.stdin.write(one)
            other.stdin.flush()
            other.stdout.readline()
            write(events, 0, 40)
    assert other.returncode == 0
    found = read_lines(events)
    assert len(found) == 82 and all(one in found for one in told)


def test_the_oldest_parts_may_be_removed(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    write(events, 0, 200)
    tail, (_, first), (_, second), *_ = EventTail(events), *list_parts(events)
    first.unlink()
    second.unlink()
    numbers = [one["number"] for one in tail.new_events()]
    assert 0 < numbers[0] < 120 and numbers == list(range(numbers[0], 200))
    write(events, 0, 3)
    assert [one["number"] for one in tail.new_events()] == [0, 1, 2]


def test_a_part_is_moved_through_no_link(tmp_path: Path) -> None:
    events, elsewhere = tmp_path / "events.jsonl", tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(elsewhere, tmp_path / "events")
    write(events, 0, 100)
    assert not list(elsewhere.iterdir()) and len(read_lines(events)) == 100


@pytest.mark.parametrize("begin", [0, 1500, 2500, 10_000_000])
def test_there_may_be_no_file_yet_or_none_any_more(tmp_path: Path, begin: int) -> None:
    events = tmp_path / "events.jsonl"
    assert read_events(events, begin) == b"" and events_size(events) == 0 and EventTail(events).read_new() == []
    write(events, 0, 100)
    while events.exists():
        write(events, 0, 1)
    assert read_events(events, begin) == read_events(events)[begin:]
