"""How long a learner stays after its last step, and what it says when it goes."""

from __future__ import annotations

from atoll.learner.script import DRAIN_S, END_WAIT_S, LEAVE_WAIT_S, LeaveWait, broken_off, patience_s


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


def test_a_script_that_failed_is_told_of_by_the_kind_of_its_error() -> None:
    assert broken_off(KeyboardInterrupt()) == "it was interrupted"
    assert broken_off(ValueError("secret")) == "its training script ended with ValueError"
