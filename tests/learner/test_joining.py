"""What a learner says while it waits for its run."""

from __future__ import annotations

import pytest

from atoll.learner import joining
from atoll.learner.joining import JoinRequest, JoinWait
from atoll.mailbox.channel import JoinProgress
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
    assert capsys.readouterr().err == "atoll: dialling 10.0.0.1:7077, 10.0.0.2:7077\n", "no dial has failed"


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


def test_the_wait_goes_on_while_the_download_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(joining.time, "monotonic", lambda: now)
    wait = waiting(speaks=False)
    for second, lacking in [(0, 80), (50, 60), (100, 60), (105, 70)]:
        now = 100.0 + second
        wait.note_progress(JoinProgress(80, lacking))
    assert wait.left_s == 5.0, "60 s from when fewer bytes were missing than ever before"


def test_the_wait_goes_on_while_others_fetch_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(joining.time, "monotonic", lambda: now)
    wait = waiting(speaks=False)
    wait.held_back = True
    wait.note_progress(JoinProgress(80, 0))
    now = 150.0
    wait.note_progress(JoinProgress(80, 0))
    assert wait.left_s == 60.0
    wait.note_beginning("all hold version 0")
    now = 170.0
    wait.note_progress(JoinProgress(80, 0))
    assert not wait.held_back and wait.left_s == 40.0, "what it waits for now is a peer's state"


def test_a_long_download_is_told_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(joining.time, "monotonic", lambda: now)
    wait = waiting()
    wait.held_back = True
    for second in range(25):
        now = 100.0 + second
        wait.note_progress(JoinProgress(80_000_000, max(0, 80_000_000 - second * 5_000_000)))
    wait.note_beginning("every learner that is here holds version 0")
    assert capsys.readouterr().err.splitlines() == [
        "atoll: fetches the run's parameters: 50 of 80 MB, 6 s left",
        "atoll: holds version 0, and waits until the others hold it too: then training begins",
        "atoll: training begins: every learner that is here holds version 0",
    ]
    for second in range(25):  # a run that was restored: its parameters are fetched anew
        now += 1.0
        wait.note_progress(JoinProgress(80_000_000, 10_000_000 + second * 1_000_000))
    assert "MB, time left not known" in (said := capsys.readouterr().err) and " -" not in said
