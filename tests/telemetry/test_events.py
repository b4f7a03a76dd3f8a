from __future__ import annotations

from atoll.telemetry.events import LEARNER_BYTES, LEARNER_RATE, TEXT_CHARS, EventLog, parse


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


def test_texts_are_clipped() -> None:
    lines: list[bytes] = []
    EventLog(lines.append).say("warning", "x" * 10**6, {"reason": "\x01" * 10**6, "round": 3})
    [event] = parse(lines)
    assert len(event["text"]) == len(event["reason"]) == TEXT_CHARS and event["round"] == 3


def test_what_one_learner_causes_fills_no_disk() -> None:
    lines: list[bytes] = []
    now = 1000.0
    log = EventLog(lines.append, clock=lambda: now)
    for number in range(10_000):
        log.say("warning", f"again {number} {'x' * 100}", {"learner": "rogue"})
        log.say("refused", "once", {"learner": f"honest-{number}"})
    of = [event.get("learner") for event in parse(lines)]
    assert len({*of}) == 10_002, "everybody else is told of as ever"
    assert sum(len(line) for line in lines if b'"rogue"' in line) <= LEARNER_BYTES
    [told] = [event for event in parse(lines) if "learner" not in event]
    assert told["text"] == "rogue makes more events than are written down: some of them are left out"
    lines.clear()
    now += 10
    for _ in range(1000):
        log.say("warning", "x" * 100, {"learner": "rogue"})
    assert 0 < sum(map(len, lines)) <= 10 * LEARNER_RATE + 200, "and what was left over"
