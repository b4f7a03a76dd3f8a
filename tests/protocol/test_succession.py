from __future__ import annotations

import pytest

from atoll.protocol.messages import Hello
from atoll.protocol.succession import Holder, judge_claim, tell_taken

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
