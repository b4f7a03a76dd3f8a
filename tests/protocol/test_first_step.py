"""A first step that takes long because it compiles: not waited for, no fault, until `first_step_s`."""

from tests.protocol.world import World

from atoll.protocol.learner.effects import FirstStep


def slow_to_start(step_s: float, first_step_s: float = 900.0) -> World:
    world = World(2, fragments=2, sync_every=4, stalled_after_s=5.0, first_step_s=first_step_s, step_s=[1.0, step_s])
    world.run_until(seconds=2.0)
    world.learners["learner-1"].handle_event(FirstStep(uses_cpu=True))
    return world


def test_a_first_step_that_computes_is_no_fault_and_is_not_waited_for() -> None:
    world = slow_to_start(30.0).run_until(seconds=24.0)
    slow = world.syncer.members.learners["learner-1"]
    assert not world.said("stalled") and slow.stalled and slow.excused and slow.first_step_s > 20.0
    [told] = world.said("starting")
    assert "first step: 5 s so far (compiling?)" in told.text
    assert world.syncer.committed > 4, "the other learner goes on alone"
    world.run_until(seconds=8.0)
    assert [note.text for note in world.said("steps")] == ["learner-1 has made its first step"]
    assert not slow.stalled and not slow.first_step_s
    world.run_until(seconds=100.0)
    assert not world.said("stalled") and world.syncer.members.learners["learner-1"].synced_t


def test_the_time_of_the_first_step_is_forgotten_with_the_second() -> None:
    world = slow_to_start(30.0).run_until(seconds=24.0)
    world.learners["learner-1"].step_s = 1.0
    world.run_until(seconds=8.0)
    assert world.syncer.members.learners["learner-1"].step_s.value < 2.0


def test_a_first_step_past_the_limit_is_told_as_a_failure() -> None:
    world = slow_to_start(1e6, first_step_s=20.0).run_until(seconds=17.0)
    assert not world.said("stalled")
    world.run_until(seconds=5.0)
    [told] = world.said("stalled")
    assert told.text.startswith(
        "learner-1 has made no step in 20 s (first_step_s); does its script call learner.step()"
    )


def test_one_that_computes_no_more_is_stalled_at_once() -> None:
    world = slow_to_start(1e6).run_until(seconds=10.0)
    world.learners["learner-1"].handle_event(FirstStep(uses_cpu=False))
    world.run_until(seconds=2.0)
    [told] = world.said("stalled")
    assert told.text.startswith("learner-1 has made no step yet;")
