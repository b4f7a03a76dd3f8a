"""Inner optimizers on their way from a peer to a newcomer: copied and taken between two steps, streamed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx

if TYPE_CHECKING:
    from atoll.simulate.simulated_learner import SimulatedLearner

NO_FIT = "'optimizer' is SGD here, AdamW in the snapshot"


@dataclass(slots=True)
class Given:
    """A copy of a peer's inner optimizer, for whoever brings a ticket."""

    giver: SimulatedLearner
    moments: int
    t: int
    held: list[int]
    """The versions in its giver's model when it was made."""
    tickets: set[str] = field(default_factory=set)


def serve(learner: SimulatedLearner) -> None:
    """Between two steps: copy its state for a newcomer, take a peer's."""
    if learner.capture > 0:
        _capture(learner)
    if learner.arrived is not None and learner.fetching:
        _take(learner, learner.arrived)


def _capture(learner: SimulatedLearner) -> None:
    number, learner.capture = learner.capture, 0
    made = Given(learner, learner.moments, learner.t, list(learner.adopted))
    direct = learner.name if learner.world.direct else ""
    fact = fx.Captured(number, learner.t, learner.state_bytes, "digest", direct)
    learner.world.queue.call_later(learner.world.network.delay(), _captured, learner, learner.machine, made, fact)


def _captured(learner: SimulatedLearner, machine: object, made: Given, fact: fx.Captured) -> object:
    if learner.machine is not machine:
        return False
    learner.given[fact.number] = made
    return learner.handle_event(fact)


def _take(learner: SimulatedLearner, given: Given) -> None:
    ticket, learner.fetching, learner.arrived = learner.fetching, "", None
    fits = learner.fits and not given.giver.lies
    if fits:
        learner.moments, learner.source = given.moments, given.giver.name
    learner.handle_event(fx.Taken(ticket, learner.t, "" if fits else NO_FIT, refused=not fits))


def fetch(learner: SimulatedLearner, ticket: str, direct: str) -> None:
    """From the peer itself, or through the syncer it is connected to."""
    learner.fetching, learner.arrived = ticket, None
    world, syncer = learner.world, learner.syncer
    if direct:
        stream_s = world.learners[direct].stream_s if direct in world.learners else 0.0
        world.queue.call_later(stream_s + world.network.delay(2.0), stream_arrives, learner, ticket)
        return
    wrong = syncer.machine.peers.wrong_newcomer(ticket, learner.name) if syncer is not None else "unreachable"
    if wrong is not None:
        world.queue.call_later(0.0, learner.handle_event, fx.StateFailed(ticket, wrong))
    else:
        world.network.up(learner, fx.RelayWanted(ticket, 0), "relay")


def pass_on(learner: SimulatedLearner, ticket: str) -> None:
    """Through the syncer, to whoever waits for it."""
    world = learner.world
    for newcomer in list(world.processes):
        if newcomer.fetching == ticket:
            world.queue.call_later(learner.stream_s + world.network.delay(2.0), stream_arrives, newcomer, ticket)


def stream_arrives(newcomer: SimulatedLearner, ticket: str) -> object:
    """Whole, if its giver is still there and can be reached, and the newcomer still wants it."""
    if newcomer.fetching != ticket or not newcomer.alive:
        return False
    givers = [
        learner for learner in newcomer.world.processes if learner.alive and not learner.frozen and learner.reachable
    ]
    given = next((one for learner in givers for one in learner.given.values() if ticket in one.tickets), None)
    if given is not None and newcomer.reachable:
        newcomer.arrived = given
        return newcomer.handle_event(fx.StateCame(ticket))
    newcomer.fetching = ""
    return newcomer.handle_event(fx.StateFailed(ticket, "the connection broke"))


def take_back(learner: SimulatedLearner, ticket: str) -> None:
    for given in learner.given.values():
        given.tickets.discard(ticket)
