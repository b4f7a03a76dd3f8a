"""The grace window: slack = τ·ξ_step − (ξ_quorum + ξ_sync), half of it, at most one step."""

import pytest
from tests.protocol.world import World

from atoll.protocol.grace import Average, Estimates, grace_s
from atoll.protocol.settings import Settings


def estimates(quorum_s: float, sync_s: float) -> Estimates:
    return Estimates(Average(quorum_s), Average(sync_s))


def test_the_formula_by_hand() -> None:
    """τ = 2, ξ_step = 1: slack = 2 − (0.3 + 0.5) = 1.2, half of it 0.6."""
    assert grace_s(1.0, estimates(0.3, 0.5), Settings(overlap=2)) == pytest.approx(0.6)


def test_it_is_capped_at_one_step() -> None:
    assert grace_s(1.0, estimates(0.0, 0.0), Settings(overlap=8)) == 1.0


def test_no_slack_no_window() -> None:
    assert grace_s(1.0, estimates(1.5, 1.0), Settings(overlap=2)) == 0.0
    assert grace_s(1.0, estimates(0.0, 0.0), Settings(overlap=0)) == 0.0


def test_it_can_be_switched_off() -> None:
    assert grace_s(1.0, estimates(0.0, 0.0), Settings(grace=False)) == 0.0


def test_before_there_are_estimates_it_is_the_start_up_time() -> None:
    assert grace_s(None, Estimates(), Settings(startup_s=3.0)) == 3.0
    assert grace_s(1.0, Estimates(), Settings(startup_s=3.0)) == 3.0


def test_an_average_moves_a_tenth_of_the_way() -> None:
    average = Average()
    average.add(1.0)
    average.add(2.0)
    assert average.value == pytest.approx(1.1)


def test_the_pull_deadline_is_four_times_the_usual_but_not_under_the_floor() -> None:
    assert Estimates().pull_deadline_s(Settings(pull_floor_s=1.0)) == 1.0
    assert estimates(0.0, 0.5).pull_deadline_s(Settings(pull_floor_s=1.0)) == 2.0


def test_the_first_round_waits_for_all_live_learners_at_most_the_start_up_time() -> None:
    world = World(learners=3, step_s=[1.0, 1.0, 20.0], fragments=2, sync_every=2, overlap=1, startup_s=3.0)
    world.run_until(round=1)
    assert world.now == pytest.approx(1.0 + 3.0)
    assert world.members(0) == {"learner-0", "learner-1"}
    assert world.syncer.last_reason == "grace window over with 2 of 3"


def test_the_window_gathers_a_learner_that_is_a_little_slower() -> None:
    world = World(learners=2, step_s=[1.0, 1.2], fragments=4, sync_every=4, quorum=1).run_until(round=40)
    both = [note for note in world.said("round") if len(note.data["members"]) == 2]  # type: ignore[arg-type]
    assert len(both) > 20
