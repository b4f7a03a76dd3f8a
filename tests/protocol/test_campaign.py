"""Seeded random worlds: latencies, speeds, kills, lost links, silence, stalls, broken and mute learners, dead couriers.

The invariants of invariants.py hold at every event; and when the faults stop, rounds go on and the run ends.
"""

import random

import pytest
from tests.protocol.world import World

FAULTS_END_S = 40.0


def a_world(seed: int) -> tuple[World, random.Random]:
    dice = random.Random(seed)
    learners, fragments = dice.randint(1, 6), dice.randint(1, 6)
    every = fragments * dice.choice([1, 2, 4]) + dice.choice([0, 0, 1])
    world = World(
        learners=learners,
        fragments=fragments,
        sync_every=every,
        overlap=dice.randint(0, min(3, every - 1)),
        quorum=dice.randint(1, learners),
        synchronous=dice.random() < 0.4,
        quorum_policy="grace" if dice.random() < 0.8 else "minimum",
        adopt=dice.choice(["overwrite", "blend", "carry"]),
        steps=dice.choice([30, 50]),
        assemble_s=10.0,
        step_s=[dice.choice([1.0, dice.uniform(0.3, 2.0)]) for _ in range(learners)],
        latency_s=dice.choice([0.0, 0.01, 0.2, 1.0]),
        jitter=dice.choice([0.0, 1.0]),
        seed=seed,
        direct=dice.random() < 0.5,
    )
    return world, dice


def some_faults(world: World, dice: random.Random) -> None:
    names = list(world.learners)
    for _ in range(dice.randint(0, 12)):
        name, start = dice.choice(names), dice.uniform(0, FAULTS_END_S - 25)
        length = dice.choice([0.0, dice.uniform(0, 3), dice.uniform(3, 20)])
        begin, finish = dice.choice(FAULTS)
        world.at(start, lambda begin=begin, name=name: begin(world, name))
        world.at(start + length, lambda finish=finish, name=name: finish(world, name))


def kill(world: World, name: str) -> None:
    if world.learners[name].alive:
        world.kill(name)


def rejoin(world: World, name: str) -> None:
    if not world.learners[name].alive:
        world.join(name, step_s=world.learners[name].step_s)


def unlink(world: World, name: str) -> None:
    world.unlink(name)


def link(world: World, name: str) -> None:
    learner = world.learners[name]
    if learner.alive and not learner.linked and not learner.over:
        world.link(name)


def hush(world: World, name: str) -> None:
    world.learners[name].silent = True


def speak(world: World, name: str) -> None:
    """What was not heard is lost with its connection; a channel that stays open loses nothing."""
    if world.learners[name].silent:
        world.learners[name].silent = False
        world.unlink(name)
    link(world, name)


def mute(world: World, name: str) -> None:
    world.learners[name].answers = False


def unmute(world: World, name: str) -> None:
    world.learners[name].answers = True


def break_numbers(world: World, name: str) -> None:
    world.learners[name].broken = True


def nothing(world: World, name: str) -> None:
    pass


def slow_stream(world: World, name: str) -> None:
    """What it gives to newcomers takes for ever."""
    world.learners[name].stream_s = 100.0


def quick_stream(world: World, name: str) -> None:
    world.learners[name].stream_s = 0.0


def restart_courier(world: World, name: str) -> None:
    if world.learners[name].alive and world.learners[name].linked:
        world.restart_courier(name)


def usurp(world: World, name: str) -> None:
    world.join(name, step_s=world.learners[name].step_s)


FAULTS = [
    (kill, rejoin),
    (unlink, link),
    (hush, speak),
    (mute, unmute),
    (World.pause, World.resume),
    (break_numbers, nothing),
    (slow_stream, quick_stream),
    (restart_courier, nothing),
    (usurp, nothing),
]


def heal(world: World) -> None:
    for name, learner in list(world.learners.items()):
        learner.answers = True
        world.resume(name)
        rejoin(world, name)
        speak(world, name)


def campaign(seed: int) -> World:
    world, dice = a_world(seed)
    some_faults(world, dice)
    for at in range(0, 200, 5):  # whoever was expelled dials again
        world.at(FAULTS_END_S + at, lambda: heal(world))
    world.run_until(seconds=FAULTS_END_S)
    world.run_to_end(seconds=3000)
    assert all(learner.over for learner in world.learners.values() if learner.linked and not learner.paused)
    return world


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in (1, 2))])
def test_whatever_happens_the_invariants_hold_and_the_run_ends(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        campaign(seed)


@pytest.mark.faults
@pytest.mark.parametrize("block", range(50))
def test_thousands_of_worlds(block: int) -> None:
    for seed in range(1000 + 100 * block, 1000 + 100 * block + 100):
        campaign(seed)
