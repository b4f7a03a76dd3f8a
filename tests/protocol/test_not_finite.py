"""The alarm that the numbers of every learner are not finite: in virtual time."""

from __future__ import annotations

from tests.protocol.world import World


def alarms(world: World) -> list[bool]:
    """Whether each of them says that it is over."""
    return [bool(note.data["over"]) for note in world.said("alarm") if note.data.get("about") == "numbers"]


def diverge(world: World, *names: str, seconds: float) -> None:
    """Their numbers break again as soon as they have recovered."""
    for _ in range(round(seconds / 0.05)):
        for name in names:
            world.learners[name].broken = True
        world.run_until(seconds=0.05)


def test_when_the_numbers_of_all_break_again_and_again_one_alarm_says_so_until_they_are_mended() -> None:
    world = World(2, fragments=4, sync_every=4, latency_s=0.02).run_until(round=6)
    diverge(world, "learner-0", "learner-1", seconds=60)
    assert len(world.said("quarantined")) > 8
    assert alarms(world) == [False]
    [note] = [note for note in world.said("alarm") if note.data.get("about") == "numbers"]
    text = "the numbers of every learner are not finite: look at the data or lower the learning rate"
    assert note.text == text
    for learner in world.learners.values():
        learner.broken = False
    world.run_until(seconds=60)
    assert alarms(world) == [False, True]


def test_a_fragment_of_running_statistics_alone_does_not_end_the_alarm() -> None:
    """They stay finite in a model that is lost: one fragment of four is accepted all the time."""
    world = World(2, fragments=4, sync_every=4, latency_s=0.02).run_until(round=6)
    diverge(world, "learner-0", "learner-1", seconds=60)
    for learner in world.syncer.members.learners.values():
        for _ in range(3):
            world.syncer.strikes.not_finite.note_accepted(learner)
    diverge(world, "learner-0", "learner-1", seconds=5)
    assert alarms(world) == [False]


def test_one_learner_that_breaks_again_and_again_is_not_the_run() -> None:
    world = World(3, fragments=4, sync_every=4, latency_s=0.02).run_until(round=6)
    diverge(world, "learner-1", "learner-2", seconds=60)
    assert len(world.said("quarantined")) > 6 and not alarms(world)


def test_one_that_is_gone_is_not_waited_for() -> None:
    world = World(3, fragments=4, sync_every=4, latency_s=0.02).run_until(round=6)
    world.kill("learner-0")
    diverge(world, "learner-1", "learner-2", seconds=60)
    assert alarms(world) == [False]


def test_one_quarantine_of_each_is_no_alarm() -> None:
    world = World(2, fragments=4, sync_every=4, latency_s=0.02).run_until(round=6)
    for learner in world.learners.values():
        learner.broken = True
    world.run_until(seconds=60)
    assert len(world.said("quarantined")) == 2 and not alarms(world)
