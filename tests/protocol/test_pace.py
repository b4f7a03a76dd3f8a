"""Keeping H honest: one round per H/P learner steps, whatever the network could do."""

import pytest
from tests.protocol.world import World

from atoll.protocol.syncer.closing import Pace


@pytest.mark.parametrize(
    ("fragments", "every"),
    [
        (1, 4),
        (4, 24),
        (6, 6),
        (5, 7),
        pytest.param(15, 24, marks=pytest.mark.faults),
        pytest.param(24, 24, marks=pytest.mark.faults),
    ],
)
@pytest.mark.parametrize("step_s", [[1.0] * 4, [1.0, 1.25, 0.77, 2.0]])
def test_the_effective_h_stays_at_h(fragments: int, every: int, step_s: list[float]) -> None:
    world = World(4, fragments=fragments, sync_every=every, step_s=step_s, quorum=1).run_until(seconds=12 * every)
    assert world.syncer.steps_between_syncs.median == pytest.approx(every, abs=max(1.0, 0.15 * every))


def test_with_more_fragments_than_h_every_fragment_is_synced_every_h_steps() -> None:
    """Twelve rounds belong to a step: all of them freeze in it, with everybody, and none is held back as a burst."""
    world = World(3, fragments=24, sync_every=2, overlap=1, latency_s=0.05).run_until(seconds=30)
    spread = world.syncer.steps_between_syncs
    assert (spread.median, spread.p95) == (2, 2)
    rounds = [note.data for note in world.said("round")]
    assert len(rounds) >= 12 * 25 and all(len(one["members"]) == 3 for one in rounds[24:])
    assert not world.said("passed")


def test_with_more_fragments_than_h_a_run_that_fell_behind_makes_up_for_one_step() -> None:
    pace = Pace(interval=2 / 24)
    pace.set_members({"a": 0})
    pace.move_learner("a", 50)
    rounds = 0
    while pace.is_due(0.0):
        pace.use_turn(0.0)
        rounds += 1
    assert 12 <= rounds <= 2 * 12 + 2, "those of this step, and of the last"


def test_a_single_learner_on_a_network_without_latency_keeps_h() -> None:
    world = World(1, fragments=6, sync_every=12, quorum=1, quorum_policy="minimum").run_until(seconds=400)
    assert world.syncer.steps_between_syncs.median == 12


def test_latency_within_the_overlap_does_not_stretch_h() -> None:
    world = World(3, fragments=6, sync_every=6, overlap=2, latency_s=0.1).run_until(seconds=300)
    assert world.syncer.steps_between_syncs.median == pytest.approx(6, abs=1)


def test_after_a_stall_there_is_no_burst_of_rounds() -> None:
    world = World(2, fragments=6, sync_every=6, quorum=2, patience_s=1000).run_until(seconds=20)
    world.unlink("learner-0")
    world.run_until(seconds=40)
    world.link("learner-0")
    before = world.syncer.committed
    world.run_until(seconds=2.5)
    assert before < world.syncer.committed <= before + 5, "two steps bring two rounds and at most two that were late"


def test_a_learner_that_trained_on_alone_makes_no_burst_when_it_comes_back() -> None:
    world = World(1, fragments=6, sync_every=6).run_until(seconds=20)
    world.unlink("learner-0")
    world.run_until(seconds=60)
    world.link("learner-0")
    before = world.syncer.committed
    world.run_until(seconds=3.5)
    assert before < world.syncer.committed <= before + 5


def test_a_change_of_members_does_not_move_the_clock() -> None:
    pace = Pace(interval=1.0)
    pace.set_members({"a": 0})
    pace.set_members({"a": 0, "b": 100})
    pace.move_learner("a", 4)
    assert pace.clock == 2.0
    for members in ({"a": 4}, {"a": 4, "c": 1000}, {"c": 1000}):
        pace.set_members(members)
        assert pace.clock == 2.0
    pace.move_learner("c", 1001)
    assert pace.clock == 3.0


def test_a_run_that_fell_behind_does_not_catch_up() -> None:
    pace = Pace(interval=1.0)
    pace.set_members({"a": 0})
    pace.move_learner("a", 50)
    rounds = 0
    while pace.is_due(0.0):
        pace.use_turn(0.0)
        rounds += 1
    assert rounds <= 3


def test_a_round_is_not_due_before_its_steps() -> None:
    world = World(2, fragments=4, sync_every=24).run_until(seconds=5.9)
    assert world.syncer.committed == 0
    world.run_until(seconds=0.2)
    assert world.syncer.committed == 1


# ---- by what a link carries ----------------------------------------------------------------------------------------


def narrow_pace(carried_s: float) -> Pace:
    pace = Pace(1.0, carried_s=carried_s)
    pace.set_members({"a": 0})
    pace.move_learner("a", 100)
    return pace


def test_a_round_waits_until_the_narrowest_part_is_free() -> None:
    pace = narrow_pace(carried_s=0.5)
    pace.use_turn(10.0)
    pace.free_at = 10.5
    assert not pace.is_due(10.4)
    assert pace.is_due(10.5)


def test_rounds_follow_each_other_at_the_pace_of_the_narrowest_part() -> None:
    pace, frozen, now = narrow_pace(carried_s=0.5), 0, 0.0
    while now < 100:
        if pace.is_due(now):
            pace.use_turn(now)
            frozen += 1
        now += 0.07
        pace.move_learner("a", int(1000 + 20 * now))
    assert frozen == pytest.approx(200, abs=2)


def test_a_part_that_idled_makes_up_for_half_a_round_at_most() -> None:
    pace = narrow_pace(carried_s=2.0)
    pace.use_turn(0.0)
    pace.use_turn(100.0)
    assert pace.free_at == pytest.approx(101.0)


def test_a_pace_of_steps_alone_waits_for_no_time() -> None:
    pace = narrow_pace(carried_s=0.0)
    pace.use_turn(10.0)
    assert pace.is_due(10.0)
