"""How much the machines may keep: numbers that follow from the settings, not from the length of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.simulate.island import Island

if TYPE_CHECKING:
    from atoll.simulate.reign import Reign
    from atoll.simulate.world import World


def too_much(world: World, reign: Reign) -> str | None:
    """The first thing there is too much of."""
    for what, count, most in _sizes(world, reign):
        if count > most:
            return f"{what}: {count}, at most {most}"
    return None


def _sizes(world: World, reign: Reign) -> Iterator[tuple[str, int, int]]:
    names, fragments = len(world.islands), world.settings.fragments
    machine, history = reign.machine, reign.machine.history
    yield "learners known", len(machine.members.learners), names
    yield "rounds open", len(machine.rounds.open), fragments
    yield "recoveries open", len(machine.peers.open), names
    yield "accounts open", len(history.ledger.open), names
    yield "lives remembered", len(history.lives), names
    yield "cuts remembered", len(history.cuts), 8
    yield "clock entries", len(machine.out.clock), names + 1
    yield "bodies kept", len(reign.bodies), (fragments + 1) * names
    for island in world.islands.values():
        yield from _of_learner(island, fragments)


def _of_learner(island: Island, fragments: int) -> Iterator[tuple[str, int, int]]:
    name, flights = island.name, 3 * fragments + 3
    yield f"copies at hand at {name}", len(island.machine._copies._at_hand), fragments
    yield f"pulls waiting at {name}", len(island.machine._copies.waiting), fragments
    yield f"orders of {name}", len(island.machine._orders.pending), flights
    yield f"adoptions due at {name}", len(island.inbox), fragments
    yield f"states given by {name}", len(island.given), 2
