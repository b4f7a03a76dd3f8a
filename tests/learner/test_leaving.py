"""How long a learner stays after its last step, and what it says when it goes."""

from __future__ import annotations

import pytest

from atoll.learner.loading import check_dataset
from atoll.learner.script import DRAIN_S, END_WAIT_S, LEAVE_WAIT_S, LeaveWait, broken_off, patience_s
from atoll.protocol.limits import LINE


def early() -> LeaveWait:
    return LeaveWait(0.0, ending=False)


def test_two_cycles_are_waited_for_where_they_take_longer() -> None:
    assert patience_s(LEAVE_WAIT_S, hurried=False) == 2 * LEAVE_WAIT_S
    assert patience_s(LEAVE_WAIT_S / 4, hurried=False) == LEAVE_WAIT_S
    assert patience_s(LEAVE_WAIT_S, hurried=True) == DRAIN_S
    assert patience_s(None, hurried=True) == LEAVE_WAIT_S


def test_one_that_leaves_early_goes_once_its_steps_are_merged_or_its_patience_ends() -> None:
    leaving = early()
    leaving.look(1.0, ending=False, unmerged=True)
    assert not leaving.may_go(10.0, 10.0, replay=False) and leaving.may_go(10.1, 10.0, replay=False)
    leaving.look(2.0, ending=False, unmerged=False)
    assert leaving.may_go(2.0, 10.0, replay=False)
    assert leaving.goodbye_reason("", saved=False) == "it left before the run ended"


def test_a_signal_shortens_the_wait_that_a_drain_began() -> None:
    leaving = early()
    leaving.look(1.0, ending=False, unmerged=True)
    assert not leaving.may_go(15.0, 60.0, replay=False) and leaving.may_go(15.0, DRAIN_S, replay=False)


def test_a_run_that_ends_meanwhile_is_waited_for_even_with_nothing_to_merge() -> None:
    leaving = early()
    leaving.look(9.0, ending=True, unmerged=False)
    assert not leaving.may_go(9.0 + END_WAIT_S, 10.0, replay=False) and leaving.may_go(
        9.1 + END_WAIT_S, 10.0, replay=False
    )
    assert leaving.goodbye_reason("", saved=False) == "the end of the run did not come"


def test_no_clock_ends_a_replay() -> None:
    leaving = early()
    leaving.look(1.0, ending=False, unmerged=True)
    assert not leaving.may_go(1e9, 10.0, replay=True)
    leaving.look(2.0, ending=False, unmerged=False)
    assert leaving.may_go(2.0, 10.0, replay=True)


def test_whoever_was_asked_to_go_says_why_and_what_became_of_its_state() -> None:
    assert early().goodbye_reason("it was drained: x", saved=True) == "it was drained: x; its state is saved"
    said = "it was drained: x; its state is not saved: it has no folder"
    assert early().goodbye_reason("it was drained: x", saved=False) == said


def test_a_script_that_failed_is_told_of_by_its_error_and_the_users_line() -> None:
    """The process may take long to end: whoever looks on should not have to wait for that."""
    assert broken_off(KeyboardInterrupt()) == "it was interrupted"
    assert broken_off(ValueError()) == "its training script ended with ValueError"
    with pytest.raises(TypeError) as caught:
        check_dataset(3, "batches")
    line = caught.traceback[0].lineno + 1
    said = broken_off(caught.value)
    assert said.startswith("its training script ended with TypeError: learner.batches takes a dataset with a length")
    assert said.endswith(f" (test_leaving.py, line {line})"), "not the line of ours that noticed"


def test_a_long_message_of_an_error_is_cut_and_stays_one_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("size mismatch\n\x1b[31m" + "x" * 10_000)
    said = broken_off(caught.value)
    assert said.startswith("its training script ended with RuntimeError: size mismatch \ufffd[31mxxx")
    assert len(said) < LINE and said.isprintable() and "(test_leaving.py, line " in said
