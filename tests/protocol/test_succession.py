from __future__ import annotations

import pytest

from atoll.protocol.messages import Hello
from atoll.protocol.succession import REMEMBERED, Holder, Predecessors, judge_claim, tell_taken

FIRST = Holder("first", proof="p" * 32, host="rack-3", pid=12)


@pytest.mark.parametrize(
    ("claimant", "claim"),
    [
        (Holder("first"), "same"),
        (Holder("second", proof="p" * 32), "successor"),
        (Holder("second", proof="q" * 32), "stranger"),
        (Holder("second", proof="…"), "stranger"),
        (Holder("second"), "stranger"),
    ],
)
def test_a_name_goes_to_the_same_process_or_its_successor_alone(claimant: Holder, claim: str) -> None:
    assert judge_claim(FIRST, claimant) == claim


def test_nobody_succeeds_one_that_has_shown_no_proof() -> None:
    assert judge_claim(Holder("first"), Holder("second")) == "stranger"


def test_the_second_process_is_told_who_has_the_name_and_what_to_do() -> None:
    assert tell_taken("learner-0", "rack-3", 12) == (
        "learner-0 is here already, from rack-3, pid 12: choose another --name (ATOLL_LEARNER)"
    )
    assert tell_taken("learner-0", "", 0) == "learner-0 is here already: choose another --name (ATOLL_LEARNER)"


def test_one_that_does_not_say_where_it_is_is_named_by_its_address() -> None:
    hello = Hello(protocol=2, learner="learner-0", session="s")
    assert Holder.of(hello, "10.0.0.7") == Holder("s", host="10.0.0.7")
    assert Holder.of(Hello(protocol=2, learner="a", session="s", host="rack-3", pid=5), "10.0.0.7").host == "rack-3"


def test_a_proof_is_printed_nowhere() -> None:
    assert "p" * 32 not in repr(FIRST)


def test_who_was_succeeded_is_known_by_name_and_folder_and_the_newest_never_is() -> None:
    before, second = Predecessors(most=8), Holder("second", proof="p" * 32)
    for holder in (FIRST, second, FIRST):
        before.note_hello("learner-0", holder)
    assert before.has_process("learner-0", FIRST) and not before.has_process("learner-0", second)
    assert not before.has_process("learner-1", FIRST)
    assert not before.has_process("learner-0", Holder("first", proof="q" * 32))


def test_processes_without_proof_succeed_nobody() -> None:
    before = Predecessors(most=8)
    for session in ("first", "second"):
        before.note_hello("learner-0", Holder(session))
    assert not before.has_process("learner-0", Holder("first"))


def test_of_restarts_and_folders_the_newest_are_remembered() -> None:
    before = Predecessors(most=2)
    sessions = [Holder(f"{number}", proof="p") for number in range(REMEMBERED + 1)]
    for holder in sessions:
        before.note_hello("learner-0", holder)
    assert [before.has_process("learner-0", one) for one in sessions] == [False, True, True, True, False]
    for name in ("learner-1", "learner-2"):
        before.note_hello(name, FIRST)
    assert not before.has_process("learner-0", sessions[1])


def test_one_that_was_forgotten_is_known_by_its_life() -> None:
    """After more restarts than are remembered, whether the newest has dialled again since or not."""
    before = Predecessors(most=2)
    for number in range(REMEMBERED + 1):
        before.note_hello("learner-0", Holder(f"{number}", proof="p"))
    late, newest = Holder("0", proof="p", life=1), Holder(f"{REMEMBERED}", proof="p", life=REMEMBERED + 1)
    assert before.has_process("learner-0", late) and not before.has_process("learner-0", newest)
    before.note_hello("learner-0", newest)
    assert before.has_process("learner-0", late)
    assert not before.has_process("learner-0", Holder("next", proof="p"))


def test_in_a_new_term_the_later_life_has_the_name_whichever_comes_first() -> None:
    late, live = Holder("0", proof="p", life=1), Holder("4", proof="p", life=5)
    for first, second in ((late, live), (live, late)):
        before = Predecessors(most=2)
        before.note_hello("learner-0", first)
        assert before.has_process("learner-0", second) == (second is late)


def test_a_life_that_it_was_given_when_it_came_late_does_not_help_it() -> None:
    before = Predecessors(most=2)
    for life in (1, 6):
        before.note_hello("learner-0", Holder("0", proof="p", life=life))
    live = Holder("4", proof="p", life=5)
    assert not before.has_process("learner-0", live)
    before.note_hello("learner-0", live)
    assert before.has_process("learner-0", Holder("0", proof="p", life=6))
