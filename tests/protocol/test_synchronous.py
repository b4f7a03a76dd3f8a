"""Synchronous runs: every round takes all live learners, and learners wait for it."""

import pytest
from msgspec.structs import replace
from tests.protocol.test_copies import copy, pull
from tests.protocol.world import World

from atoll.protocol.learner.copies import Orders
from atoll.protocol.learner.effects import LearnerEffect, Upload
from atoll.protocol.messages import Progress
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Received, Scored


def equal(world: World) -> None:
    steps = {learner.t for learner in world.learners.values() if learner.alive}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("fragments", "every", "overlap"),
    [(1, 4, 0), (2, 6, 1), (4, 4, 2), (4, 4, 3), (3, 7, 2), (6, 6, 0), (6, 2, 1), (7, 3, 0)],
)
@pytest.mark.parametrize("latency_s", [0.0, 0.3])
def test_every_round_has_every_learner(fragments: int, every: int, overlap: int, latency_s: float) -> None:
    world = World(
        3,
        fragments=fragments,
        sync_every=every,
        overlap=overlap,
        synchronous=True,
        step_s=[1.0, 0.5, 1.7],
        latency_s=latency_s,
        pull_floor_s=2.0,
    ).run_until(round=20)
    assert all(world.members(number) == set(world.learners) for number in range(20))
    assert not world.said("passed")
    assert world.syncer.steps_between_syncs.median == every


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_member_that_dies_mid_round_is_left_out_and_the_others_go_on(overlap: int) -> None:
    world = World(3, fragments=2, sync_every=6, overlap=overlap, synchronous=True, latency_s=0.1).run_until(round=4)
    world.kill("learner-1")
    world.run_until(round=10)
    assert world.members(9) == {"learner-0", "learner-2"}


@pytest.mark.parametrize(("every", "overlap"), [(6, 0), (6, 2), (2, 1)])
def test_a_newcomer_falls_into_step_with_the_others(every: int, overlap: int) -> None:
    world = World(3, present=2, fragments=2, sync_every=every, overlap=overlap, synchronous=True, assemble_s=1.0)
    world.run_until(round=5)
    world.join("learner-2")
    world.run_until(round=16)
    for number in range(12, 16):
        assert world.members(number) == {"learner-0", "learner-1", "learner-2"}
    assert not world.said("passed") and not world.said("stalled")


def test_a_run_begins_when_all_its_learners_are_there() -> None:
    world = World(3, present=2, fragments=2, sync_every=4, synchronous=True, assemble_s=60.0).run_until(seconds=20)
    assert world.syncer.committed == 0
    world.join("learner-2")
    world.run_until(round=4)
    assert world.members(3) == set(world.learners)


def test_a_run_begins_without_those_that_do_not_come() -> None:
    world = World(3, present=2, fragments=2, sync_every=4, synchronous=True, assemble_s=30.0).run_until(round=1)
    assert 30.0 <= world.now < 32.0


def test_a_stalled_learner_is_not_waited_for_and_takes_its_place_anew() -> None:
    world = World(3, fragments=2, sync_every=4, overlap=1, synchronous=True).run_until(round=4)
    world.pause("learner-1")
    world.run_until(seconds=60)
    assert world.said("stalled") and world.syncer.committed > 15
    world.resume("learner-1")
    world.run_until(seconds=30)
    last = world.syncer.committed - 1
    assert world.members(last) == set(world.learners)


def test_an_unlinked_learner_waits_and_takes_its_place_anew() -> None:
    world = World(3, fragments=2, sync_every=4, overlap=1, synchronous=True, latency_s=0.05).run_until(round=4)
    world.unlink("learner-1")
    world.run_until(seconds=30)
    assert world.learners["learner-1"].blocked
    world.link("learner-1")
    world.run_until(seconds=20)
    assert world.members(world.syncer.committed - 1) == set(world.learners)


def test_a_round_that_is_passed_over_lets_everyone_go_on() -> None:
    world = World(2, fragments=2, sync_every=4, overlap=0, synchronous=True)
    world.unmergeable = {(3, 1), (3, 2)}
    world.run_until(round=10)
    assert [note.data["round"] for note in world.said("passed")] == [3]
    assert world.members(9) == set(world.learners)


def test_a_learner_that_waits_long_for_the_others_is_not_taken_for_stalled() -> None:
    world = World(2, fragments=1, sync_every=2, overlap=0, synchronous=True, step_s=[0.1, 9.0]).run_until(round=6)
    assert not [note for note in world.said("stalled") if note.data["learner"] == "learner-0"]
    assert all(world.members(number) == set(world.learners) for number in range(6))


def test_a_mute_learner_that_waits_at_a_hold_can_still_answer_a_probe() -> None:
    world = World(1, fragments=4, sync_every=16, overlap=0, synchronous=True).run_until(round=2)
    world.learners["learner-0"].answers = False
    while not world.said("muted"):
        world.run_until(seconds=1)
    world.learners["learner-0"].answers = True
    before = world.syncer.committed
    world.run_until(round=before + 4)
    assert world.said("probed")


def test_a_mute_learner_whose_copies_a_rollback_voided_waits_for_no_round() -> None:
    """Seed 408542: at a hold it could make no copy, so no probe was answered, and the run stood still for good."""
    world = World(1, fragments=4, sync_every=5, overlap=3, synchronous=True, guard="rollback").run_until(round=8)
    world.deliver(world.simulated_syncer, Scored(8, 1.0))
    learner = world.learners["learner-0"]
    learner.answers = False
    while not world.said("muted"):
        world.run_until(seconds=1)
    world.run_until(seconds=60)
    assert len(learner.machine._orders._holds) > 1, "it has copied for more rounds than the one that gathers"
    world.deliver(world.simulated_syncer, Scored(world.syncer.committed, None))
    world.run_until(seconds=5)
    learner.answers = True
    before = world.syncer.committed
    world.run_until(seconds=15)  # sooner than the answers that got stuck are given up
    assert world.said("restored") and world.said("probed") and world.syncer.committed > before + 4


@pytest.mark.parametrize(("synchronous", "sent"), [(True, 1), (False, 2)])
def test_two_probes_in_a_row_are_answered_once(synchronous: bool, sent: int) -> None:
    """Where a learner waits for a round it has one copy; elsewhere the first body may be stuck, and a newer helps."""
    pulls = World(1, synchronous=synchronous).run_until(round=1).learners["learner-0"].machine._pulls
    effects: list[LearnerEffect] = []
    pulls._copies.do = effects.append
    pulls._copies.keep_copy(copy(5))
    for _ in range(2):
        pulls._send_answer(0.0, pull(0, probe=True))
    assert effects == [Upload(7, 0, 1)] * sent


def test_a_quarantined_learner_recovers_and_falls_into_step() -> None:
    world = World(3, fragments=2, sync_every=4, overlap=1, synchronous=True, latency_s=0.05).run_until(round=4)
    world.learners["learner-2"].broken = True
    world.run_until(seconds=60)
    assert world.said("quarantined")
    assert world.members(world.syncer.committed - 1) == set(world.learners)


def test_a_learner_that_comes_back_again_and_again_orders_nothing_more() -> None:
    orders: list[LearnerEffect] = []
    book = Orders(orders.append)
    book.settings = Settings(learners=1, fragments=2, sync_every=2, overlap=1, synchronous=True)
    book.align_steps(0)
    first = list(orders)
    for _ in range(10):
        book.align_steps(0)
    assert first and orders == first


@pytest.mark.parametrize("overlap", [0, 2])
def test_steps_that_take_longer_than_the_usual_patience_are_waited_for(overlap: int) -> None:
    """From the first on, which nobody knows the length of; waiting for a round is no step and no stall."""
    world = World(
        3,
        fragments=4,
        sync_every=4,
        overlap=overlap,
        synchronous=True,
        step_s=[12.0, 25.0, 14.0],
        latency_s=0.1,
        stalled_after_s=10.0,
    ).run_until(round=12)
    assert not world.said("stalled")
    assert all(world.members(number) == set(world.learners) for number in range(12))
    known = world.syncer.members.learners["learner-0"].step_s.value
    assert known is not None and 12.0 <= known < 27.0, "its own steps, and what it waits for the slowest"


def test_a_first_step_that_never_ends_is_not_waited_for_for_ever() -> None:
    world = World(2, fragments=2, sync_every=4, synchronous=True, step_s=[1.0, 1e6], assemble_s=30.0)
    world.run_until(round=3)
    assert world.said("stalled") and 30.0 <= world.now < 60.0
    assert world.members(2) == {"learner-0"}


@pytest.mark.parametrize("far", [90, 2**40, 2**48 - 1])
@pytest.mark.parametrize("name", ["offer", "aims"])
def test_one_that_says_it_is_far_ahead_passes_over_what_can_be_and_no_more(name: str, far: int) -> None:
    """Alone for a moment, it has "gone past" every round up to the one it names: all of them would be passed over."""
    world = World(2, fragments=2, sync_every=4, synchronous=True).run_until(round=4)
    world.unlink("learner-0")
    known, before = world.syncer.members.learners["learner-1"], world.syncer.committed
    report = Progress(
        t=known.t,
        steps=known.steps,
        tokens=known.tokens,
        versions=known.versions,
        offer=known.offer,
        aims=known.aims,
        tokens_total=known.tokens_total,
        incarnation=1,
        dropped=known.dropped,
        counted=known.versions,
    )
    effects = world.inject(Received("learner-1", replace(report, **{name: far})))
    assert len(effects) < 200 and world.syncer.committed - before <= 3 * world.settings.fragments
    world.link("learner-0")
    world.run_until(seconds=60)
    members = world.said("round")[-1].data["members"]
    assert {member["learner"] for member in members} >= {"learner-0"}  # type: ignore[attr-defined]
