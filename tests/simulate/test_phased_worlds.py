"""The fault simulator's worlds, each with phases of training: every promise holds across changes of phase too."""

from __future__ import annotations

import random

import msgspec
import pytest

from atoll.protocol.phases import TrainingPhase
from atoll.protocol.settings import Settings
from atoll.simulate.campaign import SeedPlan, plan, run


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
    """The seed's world; asynchronous, and with a budget that it comes to spend."""
    drawn = plan(seed)
    dice, own = random.Random(f"phases of {seed}"), drawn.options.settings
    own = msgspec.structs.replace(own, synchronous=False, steps=own.steps or dice.choice([60, 200]), tokens=0)
    settings = msgspec.structs.replace(own, phases=draw_phases(dice, own)).resolved(1000)
    return msgspec.structs.replace(drawn, options=msgspec.structs.replace(drawn.options, settings=settings))


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 40))])
def test_a_world_with_phases_keeps_every_promise(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        outcome = run(phased(seed))
        assert not outcome.invariant, f"seed {seed}: {outcome.invariant}: {outcome.message}"
