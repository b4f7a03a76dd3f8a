from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.syncer import ending
from atoll.syncer.ending import Ending
from atoll.telemetry.events import EventLog


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setattr(ending, "GOODBYE_S", 0.01)
    monkeypatch.setattr(ending, "LAST_SCORE_S", 0.02)
    return []


def said(lines: list[bytes]) -> list[Any]:
    return [json.loads(line)["text"] for line in lines]


async def test_an_end_without_the_last_word_of_somebody_says_so(lines: list[bytes]) -> None:
    last = Ending(EventLog(lines.append), evaluated=True)
    last.attended(2)
    await last.goodbye(trained=True)
    assert said(lines) == [
        "the run closes without its last learners, after a wait of 0.01 s",
        "the run closes without the evaluator's last score, after a wait of 0.02 s",
    ]


async def test_nobody_is_waited_for_who_is_not_there(lines: list[bytes]) -> None:
    scored = Ending(EventLog(lines.append), evaluated=True)
    scored.attended(0)
    scored.scored()
    await scored.goodbye(trained=True)
    unscored = Ending(EventLog(lines.append), evaluated=True)
    unscored.attended(1)
    unscored.attended(0)
    await unscored.goodbye(trained=False)
    assert said(lines) == []


async def test_a_run_that_never_began_has_an_end_too(lines: list[bytes]) -> None:
    last = Ending(EventLog(lines.append), evaluated=False)
    last.finish("the operator asked for it")
    await last.finished()
    last.say(None, (3, 4))
    event = json.loads(lines[0])
    assert (event["kind"], event["reason"], event["learners"]) == ("finished", "the operator asked for it", [])
    assert (event["tokens"], event["bytes_in"], event["bytes_out"]) == (None, 3, 4)
