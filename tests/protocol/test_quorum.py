"""The rule that closes a round, as a pure function, and the quorum it asks for."""

from atoll.protocol.syncer.closing import judge, judge_all, lowered_quorum


def test_below_quorum_a_round_waits_for_events_only() -> None:
    verdict = judge(5.0, ready=1, awaited=3, quorum=2, grace_ends=4.0)
    assert (verdict.close, verdict.until) == (False, None)
    assert verdict.reason == "1 of 2 learners reported"


def test_a_round_that_is_not_due_waits_even_when_everyone_is_there() -> None:
    assert not judge(5.0, ready=3, awaited=3, quorum=1, grace_ends=None).close


def test_a_due_round_closes_early_when_everyone_is_there() -> None:
    verdict = judge(5.0, ready=3, awaited=3, quorum=1, grace_ends=9.0)
    assert verdict.close and verdict.reason == "all 3 live learners reported"


def test_one_learner_is_no_plural() -> None:
    assert judge(5.0, ready=1, awaited=1, quorum=1, grace_ends=9.0).reason == "the only live learner reported"
    assert judge(5.0, ready=0, awaited=1, quorum=1, grace_ends=9.0).reason == "0 of 1 learner reported"
    assert judge_all(ready=1, missing=0).reason == "1 learner reported, all that were awaited (synchronous)"


def test_within_the_grace_window_a_round_waits_until_its_end() -> None:
    verdict = judge(5.0, ready=2, awaited=3, quorum=1, grace_ends=6.5)
    assert (verdict.close, verdict.until, verdict.reason) == (False, 6.5, "grace window open for 1.500 s")


def test_after_the_grace_window_a_round_takes_those_that_are_there() -> None:
    verdict = judge(6.5, ready=2, awaited=3, quorum=1, grace_ends=6.5)
    assert verdict.close and verdict.reason == "grace window over with 2 of 3"


def test_a_lowered_quorum_is_never_below_one_nor_above_k() -> None:
    assert lowered_quorum(4, stepping=2) == 2
    assert lowered_quorum(4, stepping=0) == 1
    assert lowered_quorum(2, stepping=6) == 2


def test_a_synchronous_round_waits_for_all_and_never_closes_empty() -> None:
    assert not judge_all(ready=2, missing=1).close
    assert not judge_all(ready=0, missing=0).close
    assert judge_all(ready=3, missing=0).close
