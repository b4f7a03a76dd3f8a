from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.protocol.errors import PeerError
from atoll.protocol.syncer.membership import KnownLearner
from atoll.syncer import ending
from atoll.syncer.ending import RunEnding
from atoll.syncer.operator import describe_unheard_drain
from atoll.telemetry.events import EventLog


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setattr(ending, "GOODBYE_S", 0.01)
    monkeypatch.setattr(ending, "LAST_SCORE_S", 0.02)
    monkeypatch.setattr(ending, "BY_HAND_S", 0.004)
    return []


def said(lines: list[bytes]) -> list[Any]:
    return [json.loads(line)["text"] for line in lines]


async def test_an_end_without_the_last_word_of_somebody_says_so(lines: list[bytes]) -> None:
    last = RunEnding(EventLog(lines.append), evaluated=True)
    last.count_connected(2)
    await last.wait_for_last(trained=True)
    assert said(lines) == [
        "the run closes without its last learners, after a wait of 0.01 s",
        "the run closes without the evaluator's last score, after a wait of 0.02 s",
    ]


async def test_the_last_score_can_be_waited_for_longer(lines: list[bytes]) -> None:
    last = RunEnding(EventLog(lines.append), evaluated=True, score_wait_s=0.06)
    await last._wait_for(last._scored, last._score_s, "the evaluator's last score")
    assert said(lines) == ["the run closes without the evaluator's last score, after a wait of 0.06 s"]


async def test_the_end_says_what_it_waits_for(lines: list[bytes]) -> None:
    last = RunEnding(EventLog(lines.append), evaluated=True)
    last.log_last_work()
    last.stop_scoring()
    last.log_last_work()
    assert said(lines) == [
        "the last steps are in; the model is written and scored",
        "the last steps are in; the model is written",
    ]


async def test_nobody_is_waited_for_who_is_not_there(lines: list[bytes]) -> None:
    scored = RunEnding(EventLog(lines.append), evaluated=True)
    scored.count_connected(0)
    scored.stop_scoring()
    await scored.wait_for_last(trained=True)
    unscored = RunEnding(EventLog(lines.append), evaluated=True)
    unscored.count_connected(1)
    unscored.count_connected(0)
    await unscored.wait_for_last(trained=False)
    assert said(lines) == []


async def test_an_evaluator_that_was_started_by_hand_is_waited_for_as_well(lines: list[bytes]) -> None:
    """The summary gave an older score as the end's, and the evaluator found nobody to send the last one to."""
    last = RunEnding(EventLog(lines.append), evaluated=False)
    last.count_connected(0)
    last.note_score(final=False, took_s=0.002)
    await last.wait_for_last(trained=True)
    assert said(lines) == ["the run closes without the evaluator's last score, after a wait of 0.01 s"]
    last.note_score(final=True)
    await last.wait_for_last(trained=True)
    assert len(lines) == 1


async def test_a_run_that_never_began_has_an_end_too(lines: list[bytes]) -> None:
    last = RunEnding(EventLog(lines.append), evaluated=False)
    last.finish_run("the operator asked for it")
    await last.wait_until_finished()
    last.log_end(None, (3, 4))
    event = json.loads(lines[0])
    assert (event["kind"], event["reason"], event["learners"]) == ("finished", "the operator asked for it", [])
    assert (event.get("tokens"), event["bytes_in"], event["bytes_out"]) == (None, 3, 4)


def test_a_drain_of_a_process_that_another_has_replaced_is_to_be_asked_again() -> None:
    learner = KnownLearner("a", "session", 1, 0.0, 2, draining="the operator asked")
    assert describe_unheard_drain(learner).startswith("a is asked to leave, but has not answered yet")
    with pytest.raises(PeerError, match="another process is a by now: drain it again if that is to leave too"):
        describe_unheard_drain(KnownLearner("a", "another session", 2, 0.0, 2))
