"""Inner optimizers on their way from a peer to a newcomer: copied and taken between two steps, streamed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx

if TYPE_CHECKING:
    from atoll.simulate.island import Island

NO_FIT = "'optimizer' is SGD here, AdamW in the snapshot"


@dataclass(slots=True)
class Given:
    """A copy of a peer's inner optimizer, for whoever brings a ticket."""

    giver: Island
    moments: int
    t: int
    held: list[int]
    """The versions in its giver's model when it was made."""
    tickets: set[str] = field(default_factory=set)


def serve(island: Island) -> None:
    """Between two steps: copy its state for a newcomer, take a peer's."""
    if island.capture > 0:
        _capture(island)
    if island.arrived is not None and island.fetching:
        _take(island, island.arrived)


def _capture(island: Island) -> None:
    number, island.capture = island.capture, 0
    made = Given(island, island.moments, island.t, list(island.adopted))
    direct = island.name if island.world.direct else ""
    fact = fx.Captured(number, island.t, island.state_bytes, "digest", direct)
    island.world.agenda.later(island.world.network.delay(), _captured, island, island.machine, made, fact)


def _captured(island: Island, machine: object, made: Given, fact: fx.Captured) -> object:
    if island.machine is not machine:
        return False
    island.given[fact.number] = made
    return island.hear(fact)


def _take(island: Island, given: Given) -> None:
    ticket, island.fetching, island.arrived = island.fetching, "", None
    fits = island.fits and not given.giver.lies
    if fits:
        island.moments, island.source = given.moments, given.giver.name
    island.hear(fx.Taken(ticket, island.t, "" if fits else NO_FIT, refused=not fits))


def fetch(island: Island, ticket: str, direct: str) -> None:
    """From the peer itself, or through the syncer it is connected to."""
    island.fetching, island.arrived = ticket, None
    world, reign = island.world, island.reign
    if direct:
        stream_s = world.islands[direct].stream_s if direct in world.islands else 0.0
        world.agenda.later(stream_s + world.network.delay(2.0), stream_arrives, island, ticket)
        return
    wrong = reign.machine.peers.wrong_newcomer(ticket, island.name) if reign is not None else "unreachable"
    if wrong is not None:
        world.agenda.later(0.0, island.hear, fx.StateFailed(ticket, wrong))
    else:
        world.network.up(island, fx.RelayWanted(ticket, 0), "relay")


def pass_on(island: Island, ticket: str) -> None:
    """Through the syncer, to whoever waits for it."""
    world = island.world
    for newcomer in list(world.processes):
        if newcomer.fetching == ticket:
            world.agenda.later(island.stream_s + world.network.delay(2.0), stream_arrives, newcomer, ticket)


def stream_arrives(newcomer: Island, ticket: str) -> object:
    """Whole, if its giver is still there and can be reached, and the newcomer still wants it."""
    if newcomer.fetching != ticket or not newcomer.alive:
        return False
    givers = [island for island in newcomer.world.processes if island.alive and not island.frozen and island.reachable]
    given = next((one for island in givers for one in island.given.values() if ticket in one.tickets), None)
    if given is not None and newcomer.reachable:
        newcomer.arrived = given
        return newcomer.hear(fx.StateCame(ticket))
    newcomer.fetching = ""
    return newcomer.hear(fx.StateFailed(ticket, "the connection broke"))


def take_back(island: Island, ticket: str) -> None:
    for given in island.given.values():
        given.tickets.discard(ticket)
