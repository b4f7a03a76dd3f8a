"""Faults in a world: each begins at its moment, and is mended after its time."""

from __future__ import annotations

from atoll.simulate.faults import Fault
from atoll.simulate.inject_learners import LEARNERS, come_back, new_courier, resume, thaw
from atoll.simulate.inject_rest import REST
from atoll.simulate.world import World

__all__ = ["LEARNERS", "REST", "come_back", "new_courier", "resume", "schedule", "thaw"]


def schedule(world: World, faults: list[Fault]) -> None:
    for fault in faults:
        world.queue.call_later(fault.at, _begin, world, fault)


def _begin(world: World, fault: Fault) -> object:
    if world.finished:
        return False
    world.happened(fault)
    world.invariants.drains.happened(fault)
    if fault.target >= 0:
        learner = world.learners.get(f"learner-{fault.target}")
        return LEARNERS[fault.kind](world, learner, fault) if learner is not None else False
    return REST[fault.kind](world, fault)
