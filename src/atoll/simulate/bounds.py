"""How much the machines may keep: numbers that follow from the settings, not from the length of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.simulate.simulated_learner import SimulatedLearner

if TYPE_CHECKING:
    from atoll.simulate.simulated_syncer import SimulatedSyncer
    from atoll.simulate.world import World


def too_much(world: World, syncer: SimulatedSyncer) -> str | None:
    """The first thing there is too much of."""
    for what, count, most in _sizes(world, syncer):
        if count > most:
            return f"{what}: {count}, at most {most}"
    return None


def _sizes(world: World, syncer: SimulatedSyncer) -> Iterator[tuple[str, int, int]]:
    names, fragments = len(world.learners), world.settings.fragments
    machine, history = syncer.machine, syncer.machine.history
    yield "learners known", len(machine.members.learners), names
    yield "rounds open", len(machine.state.open_rounds), fragments
    yield "recoveries open", len(machine.peers.open), names
    yield "accounts open", len(history.ledger.open), names
    yield "lives remembered", len(history.lives), names
    yield "cuts remembered", len(history.cuts), 8
    yield "clock entries", len(machine.state.out.clock), names + 1
    yield "payloads kept", len(syncer.payloads), (fragments + 1) * names
    for learner in world.learners.values():
        yield from _of_learner(learner, fragments)


def _of_learner(learner: SimulatedLearner, fragments: int) -> Iterator[tuple[str, int, int]]:
    name, flights = learner.name, 3 * fragments + 3
    yield f"copies at hand at {name}", len(learner.machine._copies._at_hand), fragments
    yield f"pulls waiting at {name}", len(learner.machine._copies.waiting), fragments
    yield f"orders of {name}", len(learner.machine._orders.pending), flights
    yield f"adoptions due at {name}", len(learner.inbox), fragments
    yield f"states given by {name}", len(learner.given), 2
