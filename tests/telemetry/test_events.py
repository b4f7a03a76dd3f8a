from __future__ import annotations

from atoll.telemetry.events import EventLog, parse


def test_what_is_said_can_be_read_again() -> None:
    lines: list[bytes] = []
    log = EventLog(lines.append, clock=lambda: 12.3456789)
    log.say("round", "round 0: ünï\ncode", {"round": 0, "members": ("a",), "loss": None})
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    event = {"at": 12.345679, "kind": "round", "text": "round 0: ünï\ncode", "round": 0, "members": ["a"], "loss": None}
    assert list(parse(lines)) == [event]


def test_a_number_that_is_none_is_null() -> None:
    lines: list[bytes] = []
    EventLog(lines.append).say("score", "?", {"loss": float("nan")})
    assert next(parse(lines))["loss"] is None


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    lines: list[bytes] = []
    log = EventLog(lines.append, clock=lambda: 1.0)
    log.say("a", "first")
    log.say("b", "second")
    assert [event["kind"] for event in parse([lines[0], lines[1][:-4]])] == ["a"]
    assert [event["kind"] for event in parse([b"\n", *lines])] == ["a", "b"]


def test_lines_that_are_no_events_are_left_out() -> None:
    good = b'{"at": 1.0, "kind": "a", "text": ""}\n'
    assert [event["kind"] for event in parse([b"[1]\n", b"3\n", b'{"kind": "b"}\n', b'{"a": "\xff"}\n', good])] == ["a"]
