"""The grace window: slack = τ·ξ_step − (ξ_quorum + ξ_sync), half of it, at most one step."""

import pytest
from tests.protocol.world import World

from atoll.protocol.messages import Pull
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import Average
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.closing import Estimates, grace_s
from atoll.protocol.syncer.quorums import load_policy


def estimates(quorum_s: float, sync_s: float) -> Estimates:
    return Estimates(Average(quorum_s), Average(sync_s))


def test_the_formula_by_hand() -> None:
    """τ = 2, ξ_step = 1: slack = 2 − (0.3 + 0.5) = 1.2, half of it 0.6."""
    assert grace_s(1.0, estimates(0.3, 0.5), Settings(overlap=2).resolved(24)) == pytest.approx(0.6)


def test_it_is_capped_at_one_step() -> None:
    assert grace_s(1.0, estimates(0.0, 0.0), Settings(overlap=8).resolved(24)) == 1.0


def test_no_slack_no_window() -> None:
    assert grace_s(1.0, estimates(1.5, 1.0), Settings(overlap=2).resolved(24)) == 0.0
    assert grace_s(1.0, estimates(0.0, 0.0), Settings(overlap=0).resolved(24)) == 0.0


def test_the_quorum_policy_says_how_long_a_round_waits() -> None:
    assert load_policy("grace")(0.5, 0.0) == 0.5
    assert load_policy("grace")(0.5, 1.0) == 1.0, "one that was late is waited for"
    assert load_policy("minimum")(0.5, 1.0) == 0.0


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


def test_what_the_slowest_sets_ends_at_four_times_what_the_median_would() -> None:
    settings = Settings(pull_floor_s=1.0)
    assert estimates(0.0, 0.5).pull_deadline_s(settings, 0.01) == 2.0, "a slow link has its time"
    assert estimates(0.0, 100.0).pull_deadline_s(settings, 0.01) == 4.0
    assert estimates(0.0, 100.0).pull_deadline_s(settings, 1.0) == 16.0
    assert estimates(0.0, 100.0).pull_deadline_s(settings, 100.0) == 400.0, "all are slow"


@pytest.mark.parametrize("learners", [2, 3, 5])
def test_one_that_answers_as_late_as_it_may_does_not_make_deadlines_longer_without_end(learners: int) -> None:
    world = World(learners, fragments=4, sync_every=4, step_s=2.0, quorum=1).run_until(round=8)
    deliver, late = world._deliver, "learner-1"

    def at_the_last_moment(event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        if not isinstance(event, fx.Delivered) or event.learner != late or event.contribution.probe:
            return deliver(event)
        wait_s = 0.9 * [pull for _, pull in world.sent(Pull, late)][-1].deadline_s
        world.at(world.now + wait_s, lambda: deliver(event))
        return []

    world._deliver = at_the_last_moment  # type: ignore[method-assign]
    world.run_until(round=120)
    asked = [pull.deadline_s for _, pull in world.sent(Pull, late)]
    assert max(asked) <= 4.0, "four times the floor: the others answer at once"
    assert late in world.members(100), "it is only slow"


def test_where_all_links_are_slow_the_deadline_is_as_long_as_they_need() -> None:
    world = World(3, fragments=2, sync_every=8, latency_s=2.0, step_s=2.0, lost_after_s=30.0).run_until(round=30)
    assert len(world.members(29)) == 3 and world.syncer.rounds.closing.deadline_s > 12.0


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
