"""The fault simulator's worlds, each with phases of training: every promise holds across changes of phase too."""

from __future__ import annotations

import random

import msgspec
import pytest

from atoll.protocol.phases import TrainingPhase
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import ChangeAsked
from atoll.simulate.campaign import Outcome, SeedPlan, make, plan, run
from atoll.simulate.world import World


def draw_phases(dice: random.Random, settings: Settings) -> tuple[TrainingPhase, ...]:
    ends = sorted({dice.choice([0.05, 0.15, 0.3, 0.5, 0.8]) for _ in range(dice.randint(1, 3))})
    return tuple(_draw_phase(dice, until, settings) for until in ends)


def _draw_phase(dice: random.Random, until: float, settings: Settings) -> TrainingPhase:
    overlap = dice.choice([0, 1, settings.overlap])
    every = overlap + dice.choice([1, 1, 2, settings.fragments])
    return TrainingPhase(
        until=until,
        sync_every=every,
        overlap=overlap,
        adopt=dice.choice([None, "overwrite", "carry", "blend"]),
        outer_momentum=dice.choice([None, 0.0]),
    )


def phased(seed: int) -> SeedPlan:
    """The seed's world with phases, and with a budget that it comes to spend."""
    drawn = plan(seed)
    dice, own = random.Random(f"phases of {seed}"), drawn.options.settings
    own = msgspec.structs.replace(own, steps=own.steps or dice.choice([60, 200]), tokens=0)
    settings = msgspec.structs.replace(own, phases=draw_phases(dice, own)).resolved(1000)
    return msgspec.structs.replace(drawn, options=msgspec.structs.replace(drawn.options, settings=settings))


def set_by_hand(world: World, dice: random.Random) -> None:
    """`atoll set` of H, τ and adoption, or of all phases, until the run is over."""
    before = world.syncer.next_settings.settings
    if not before.synchronous and world.syncer.phase == "running":
        overlap = dice.choice([0, 1, before.overlap])
        by_hand = {"sync_every": overlap + dice.choice([1, 3, before.fragments]), "overlap": overlap}
        asked = msgspec.structs.replace(before, **by_hand, adopt=dice.choice(["overwrite", "blend", "carry"]))
        if dice.random() < 0.3:
            asked = before.with_phases(draw_phases(dice, before), world.syncer.history.begun.settings)
        world.deliver(world.simulated_syncer, ChangeAsked(asked, {}, "by hand"))
    if not world.finished:
        world.queue.call_later(dice.uniform(5.0, 40.0), set_by_hand, world, dice)


def run_changed(drawn: SeedPlan) -> Outcome:
    world = make(drawn)
    world.queue.call_later(5.0, set_by_hand, world, random.Random(f"by hand {drawn.seed}"))
    return run(drawn, world)


@pytest.mark.parametrize("changed", [False, True], ids=["", "and set by hand"])
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 40))])
def test_a_world_with_phases_keeps_every_promise(block: int, changed: bool) -> None:
    for seed in range(10 * block, 10 * block + 10):
        outcome = (run_changed if changed else run)(phased(seed))
        assert not outcome.invariant, f"seed {seed}: {outcome.invariant}: {outcome.message}"
