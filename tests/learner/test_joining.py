"""What a learner says while it waits for its run."""

from __future__ import annotations

import pytest

from atoll.learner import joining
from atoll.learner.joining import JoinRequest, JoinWait
from atoll.protocol.errors import Unreachable

LINK = "atoll://0123456789abcdef@10.0.0.1:7077,10.0.0.2:7077/run/" + "0" * 64


def waiting(*, speaks: bool = True) -> JoinWait:
    wait = JoinWait(JoinRequest(LINK, "mine", 0, "", wait_s=60.0), speaks=speaks)
    wait.begin()
    return wait


def test_one_that_was_answered_or_has_just_begun_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting().say_dialling()
    monkeypatch.setattr(joining, "SILENT_S", 0.0)
    waiting(speaks=False).say_dialling()
    assert capsys.readouterr().err == ""


def test_one_that_nobody_answers_says_once_where_it_dials_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "SILENT_S", 0.0)
    wait = waiting()
    wait.unreached = "connection refused"
    wait.say_dialling()
    wait.say_dialling()
    assert capsys.readouterr().err == (
        "atoll: dialling 10.0.0.1:7077, 10.0.0.2:7077: no syncer answers yet (connection refused); "
        "it gives up after 60 s\n"
    )


def test_a_plain_address_that_nobody_answers_at_is_named_while_its_run_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([None, "beef"])
    monkeypatch.setattr(joining, "ask_run", lambda url: next(answers))
    monkeypatch.setattr(joining, "SILENT_S", 0.0)
    wait = JoinWait(JoinRequest("http://127.0.0.1:7077", "mine", 0, "", wait_s=60.0), speaks=True)
    wait.begin()
    assert wait.find_run(lambda: False, asks=True) == "beef"
    wait.say_dialling()
    assert capsys.readouterr().err.count("dialling 127.0.0.1:7077") == 1


def test_what_passed_before_a_courier_could_dial_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A large saved state took longer to read: "no syncer answers yet", and nobody had dialled."""
    now = 100.0
    monkeypatch.setattr(joining.time, "monotonic", lambda: now)
    wait = waiting()
    now += 30.0
    wait.give_courier_time()
    wait.say_dialling()
    assert capsys.readouterr().err == ""
    now += joining.SILENT_S
    wait.say_dialling()
    assert "no syncer answers yet" in capsys.readouterr().err


def test_an_address_that_never_answered_is_unreached_also_if_no_courier_has_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a crowded machine the courier's five seconds went by before it dialled, and the learner trained alone."""
    monkeypatch.setattr(joining, "ask_run", lambda url: None)
    wait = JoinWait(JoinRequest("http://127.0.0.1:7077", "mine", 0, "", wait_s=0.0), speaks=True)
    wait.begin()
    assert wait.find_run(lambda: False, asks=True) == ""
    with pytest.raises(
        Unreachable, match=r"no syncer answers at 127\.0\.0\.1:7077: nothing answers there, tried for 0 s"
    ):
        wait.check_reached()
