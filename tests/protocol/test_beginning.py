"""A run begins when its learners are here, or were waited for. How it comes by version 0 is in test_membership.py."""

import pytest
from msgspec.structs import replace
from tests.protocol.world import World

from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Started, Welcome
from atoll.protocol.settings import Settings
from atoll.simulate import campaign


def test_nobody_trains_before_all_learners_are_here() -> None:
    world = World(3, present=2, wait_for_learners_s=30.0).run_until(seconds=10)
    assert world.syncer.phase == "empty" and world.syncer.run_start.awaited_learners == 1
    assert [learner.t for learner in world.learners.values()] == [0, 0]
    assert world.said("waiting")[0].text == "waiting for 1 more of 3 learners, up to 30 s; then training begins"
    world.join("learner-2")
    world.run_until(seconds=1)
    assert world.syncer.phase == "running" and world.syncer.run_start.awaited_learners == 0
    world.run_until(round=1)
    assert world.members(0) == {"learner-0", "learner-1", "learner-2"}
    assert not world.said("warning")


def test_after_the_stated_time_it_begins_without_who_has_not_come() -> None:
    world = World(3, present=2, wait_for_learners_s=30.0).run_until(seconds=29)
    assert world.syncer.phase == "empty"
    world.run_until(seconds=2)
    assert world.syncer.phase == "running"
    assert world.said("warning")[0].text.startswith("1 of 3 learners did not come in time")
    world.run_until(round=1)
    world.join("learner-2")
    world.run_until(round=8)
    assert "learner-2" in world.members(7), "it may come later"


def test_the_step_of_a_run_that_waited_is_that_of_its_learners() -> None:
    """A learner that trained alone for a while would have moved it: 300 steps were asked for, 286 and 216 made."""
    world = World(2, present=1, steps=40, wait_for_learners_s=60.0).run_until(seconds=20)
    world.join("learner-1")
    world.run_to_end()
    assert all(40 <= learner.t <= 44 for learner in world.learners.values())


def test_who_gave_the_first_parameters_may_die_while_others_are_waited_for() -> None:
    world = World(3, present=2, wait_for_learners_s=30.0).run_until(seconds=5)
    world.kill("learner-0")
    world.run_until(seconds=5)
    assert [message.upload for _, message in world.sent(Welcome, "learner-1")] == [False], "they are here already"
    world.join("learner-2")
    world.join("learner-3")
    world.run_until(round=2)
    assert world.said("initial")[0].text == "learner-0 gave the first parameters"
    assert world.members(1) == {"learner-1", "learner-2", "learner-3"}


def test_an_uploader_that_restarts_while_others_are_waited_for_takes_version_0_like_everybody() -> None:
    """Its new process has other first weights (an unseeded script), under the name of the one that gave version 0."""
    world = World(3, present=2, wait_for_learners_s=30.0).run_until(seconds=5)
    gave = world.learners["learner-0"].base
    world.kill("learner-0")
    world.run_until(seconds=5)
    again = world.join("learner-0")
    assert again.base != gave, "the test proves nothing where both processes begin with the same weights"
    world.join("learner-2")
    world.run_until(round=2)
    assert [a[1:] for a in again.adoptions if a[2] == 0] == [(0, 0), (1, 0)]
    assert world.members(1) == {"learner-0", "learner-1", "learner-2"}


def test_an_uploader_whose_connection_or_courier_breaks_while_others_are_waited_for_owns_version_0() -> None:
    world = World(3, present=2, wait_for_learners_s=30.0).run_until(seconds=5)
    world.unlink("learner-0")
    world.link("learner-0")
    world.restart_courier("learner-0")
    world.join("learner-2")
    world.run_until(round=2)
    assert [a for a in world.learners["learner-0"].adoptions if a[2] == 0] == [], "it is the same process"
    assert world.members(1) == {"learner-0", "learner-1", "learner-2"}


def test_a_syncer_that_dies_while_it_waits_begins_anew() -> None:
    world = World(2, present=1, wait_for_learners_s=10.0).run_until(seconds=5)
    world.crash_syncer(down_s=1.0)
    world.join("learner-1")
    world.run_until(round=2)
    assert world.members(1) == {"learner-0", "learner-1"}


def test_a_run_that_is_ended_while_it_waits_is_over() -> None:
    world = World(2, present=1, wait_for_learners_s=10.0).run_until(seconds=5)
    world.end()
    assert world.syncer.phase == "finished" and not world.sent(Started)


def test_without_a_wait_it_begins_with_the_first() -> None:
    world = World(3, present=1).run_until(round=1)
    assert world.members(0) == {"learner-0"} and not world.said("waiting")


def test_a_wait_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="wait_for_learners_s = -1 is below 0: 0 waits for nobody"):
        Settings(wait_for_learners_s=-1)


@pytest.mark.parametrize(
    ("seed", "wait_s"),
    [
        *((seed, 6.0) for seed in range(4)),
        (51, 30.0),
        *(pytest.param(seed, 6.0, marks=pytest.mark.faults) for seed in range(4, 12)),
    ],
)
def test_promises_hold_in_worlds_of_faults_that_wait(seed: int, wait_s: float) -> None:
    """In world 51 the uploader is restarted while the run waits."""
    plan = campaign.plan(seed)
    waiting = replace(plan.options.settings, wait_for_learners_s=wait_s)
    outcome = campaign.run(replace_settings(plan, waiting))
    assert not outcome.invariant, f"{outcome.invariant}: {outcome.message}"


def replace_settings(plan: campaign.SeedPlan, settings: Settings) -> campaign.SeedPlan:
    return replace(plan, options=replace(plan.options, settings=settings))
