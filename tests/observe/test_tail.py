from __future__ import annotations

from pathlib import Path

from atoll.observe.screen import EventTail


def test_events_are_read_once_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read_new() == []
    path.write_bytes(b'{"at":1,"kind":"run","text":"x"}\n{"at":2,"ki')
    assert [event["kind"] for event in tail.read_new()] == ["run"]
    assert tail.read_new() == []
    with path.open("ab") as file:
        file.write(b'nd":"joined","text":"\xc3\xa9"}\n')
    assert [event["text"] for event in tail.read_new()] == ["é"]
    assert tail.read_new() == []


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"at":1,"ki\n[]\n{}\n\n{"at":2,"kind":"score","text":""}\n')
    assert [event["at"] for event in EventTail(path).read_new()] == [2]


def test_what_lies_too_far_back_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [b'{"at":%d,"kind":"round","text":""}\n' % at for at in range(10, 90)]
    path.write_bytes(b"".join(lines[:40]))
    tail = EventTail(path, most_bytes=5 * len(lines[0]) + 3)
    assert [event["at"] for event in tail.read_new()] == [45, 46, 47, 48, 49], "a line that is cut through is left out"
    with path.open("ab") as file:
        file.write(b"".join(lines[40:42]))
    assert [event["at"] for event in tail.read_new()] == [50, 51]


def test_rounds_far_back_are_passed_over_and_the_rest_is_not(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rounds = b"".join(b'{"at":%d,"kind":"round","text":"%s"}\n' % (at, b"x" * 1000) for at in range(5000))
    path.write_bytes(b'{"at":1,"kind":"score","text":""}\n' + rounds)
    found = EventTail(path, near_bytes=1 << 20).read_new()
    assert found[0]["kind"] == "score" and len(found) < 3100
    assert found[-1]["at"] == 4999
