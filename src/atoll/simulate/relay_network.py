"""The network of a world with relays: learners of a region come through theirs, and go to the syncer without it.

A connection through a relay has two legs: a short one below, the region's link above. Messages keep their order over
both; the relay reads what passes. Bodies of contributions end at the relay if it may hold them; versions are fetched
once and served from a copy. A learner whose connection is lost dials the next address: the relay's and the syncer's in
turn (fabric/client.py). One that is connected directly looks for its relay from time to time, but not while the run
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from atoll.fabric.client import RELAY_S
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import ContributionKey, Ending, Finish
from atoll.protocol.relay import RELAY_BACK, HeldBody
from atoll.protocol.syncer import effects as syncer_fx
from atoll.simulate.links import SimulatedLink
from atoll.simulate.network import DIAL_S, NOTICE_S, STUCK_S, Network, NetworkWorld
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_relay import SimulatedRelay
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer
from atoll.simulate.training import Payload

NEAR = 0.1
"""Within a region messages take this share of what they take to the syncer."""


class RelayedWorld(NetworkWorld, Protocol):
    relays: list[SimulatedRelay]

    def relay_of(self, learner: SimulatedLearner) -> SimulatedRelay | None: ...


class HeldUpload(NamedTuple):
    """A body that a relay holds, and whose learner waits for the answer."""

    learner: SimulatedLearner
    machine: LearnerMachine
    connection: Connection
    session: str
    """Of the relay's process that took it."""
    key: ContributionKey
    digest: str
    seconds: float
    """Seconds that the body took on a link of a given width to the relay; 0: there is no such link."""

    @property
    def relay(self) -> SimulatedRelay:
        relay: SimulatedRelay = self.connection.relay
        return relay

    @property
    def is_of_this_life(self) -> bool:
        return self.relay.alive and self.relay.session == self.session

    def find_break(self) -> str:
        """Why the relay and the syncer do not hear each other about it; empty: they do."""
        return "unreachable" if not self.is_of_this_life or self.relay.cut or self.relay.paused else ""


class RelayedFetch(NamedTuple):
    """A version that a learner asks its relay for."""

    learner: SimulatedLearner
    machine: LearnerMachine
    connection: Connection
    session: str
    """Session of the relay's process that is asked."""
    fragment: int
    asked_at: float


class RelayedNetwork(Network):
    world: RelayedWorld

    def __init__(self, world: RelayedWorld, latency_s: float, jitter: float) -> None:
        super().__init__(world, latency_s, jitter)
        self._turns: dict[str, bool] = {}
        """By session: whether its next dial goes to the relay."""
        self._ending: set[Connection] = set()
        """On which learners heard that the run ends."""

    @property
    def longest_s(self) -> float:
        return super().longest_s * (1 + NEAR)

    def near_delay(self) -> float:
        return NEAR * self.delay()

    # ---- control ------------------------------------------------------------------------------------------------

    def _come_up(self, connection: Connection, event: syncer_fx.SyncerEvent) -> object:
        """At the relay, where there is one."""
        relay = connection.relay
        if relay is None:
            return super()._come_up(connection, event)
        if not relay.has_passage(connection):
            return False
        if connection.learner.blocked_up:
            connection.held_up.append(event)
            return None
        return relay.unless_paused(self._pass_up, connection, event)

    def _pass_up(self, connection: Connection, event: syncer_fx.SyncerEvent) -> object:
        """From the relay on."""
        relay = connection.relay
        if not relay.has_passage(connection):
            return False
        if isinstance(event, syncer_fx.Lost):
            relay.close_passage(connection)
        at = connection.at("above", self.queue.now + self.delay())
        self.queue.call_at(at, relay.unless_cut, self._arrive_up, connection, event)
        return None

    def _arrive_up(self, connection: Connection, event: syncer_fx.SyncerEvent) -> object:
        syncer = connection.syncer
        if syncer.channels.get(connection.learner.name) is not connection or not syncer.alive:
            return False
        return self._hear_up(syncer, event)

    def _pass_down(self, connection: Connection, event: learner_fx.LearnerEvent, delay_s: float) -> None:
        relay = connection.relay
        if relay is None:
            super()._pass_down(connection, event, delay_s)
            return
        at = connection.at("down above", self.queue.now + delay_s)
        self.queue.call_at(at, relay.unless_cut, self._read_at_relay, connection, event)

    def _read_at_relay(self, connection: Connection, event: learner_fx.LearnerEvent) -> object:
        return connection.relay.unless_paused(self._pass_on_down, connection, event)

    def _pass_on_down(self, connection: Connection, event: learner_fx.LearnerEvent) -> object:
        relay = connection.relay
        if not relay.has_passage(connection):
            return False
        if isinstance(event, learner_fx.Arrived):
            relay.read_message(connection.learner.name, event.message)
        else:
            relay.close_passage(connection)
        super()._pass_down(connection, event, self.near_delay())
        return None

    def _come_down(self, connection: Connection, event: learner_fx.LearnerEvent) -> object:
        if isinstance(event, learner_fx.Arrived) and isinstance(event.message, Ending | Finish):
            self._ending.add(connection)
        return super()._come_down(connection, event)

    def lose_relay(self, connections: Sequence[Connection], reason: str) -> None:
        """It closes its sockets, below and above."""
        for connection in connections:
            super()._pass_down(connection, learner_fx.Disconnected(reason), self.near_delay())
            lost = syncer_fx.Lost(connection.learner.name, reason)
            at = connection.at("above", self.queue.now + self.delay())
            self.queue.call_at(at, connection.relay.unless_cut, self._arrive_up, connection, lost)

    def _notice(self, connection: Connection) -> object:
        """Of a connection through a relay each leg has pings of its own."""
        relay, learner = connection.relay, connection.learner
        if relay is None:
            return super()._notice(connection)
        answered = learner.reachable and not relay.paused and not relay.hidden and relay.has_passage(connection)
        if learner.connection is not connection or answered:
            return False
        if not relay.paused and relay.has_passage(connection):
            self._pass_up(connection, syncer_fx.Lost(learner.name, "ping timeout"))
        if learner.frozen:
            self.queue.call_later(NOTICE_S, self._notice, connection)
            return False
        return self.lose_connection(learner, "the relay does not answer pings")

    def stop_pings(self, syncer: SimulatedSyncer) -> None:
        super().stop_pings(syncer)
        for relay in self.world.relays:
            if relay.link is not None and relay.link.syncer is syncer:
                self.queue.call_later(NOTICE_S * self.random.uniform(0.5, 1.0), relay.give_up_link)

    def stop_pings_of_relay(self, relay: SimulatedRelay) -> None:
        """It stands still, or nobody of its region reaches it."""
        for connection in list(relay.passages):
            self.queue.call_later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)

    # ---- dialling -----------------------------------------------------------------------------------------------

    def dial_later(self, learner: SimulatedLearner, wait_s: float = 0.0) -> None:
        """Whom: after a loss or a dial in vain, the other address."""
        self._turns[learner.session] = not self._turns.get(learner.session, False)
        super().dial_later(learner, wait_s)

    def _dial(self, learner: SimulatedLearner) -> object:
        relay = self.world.relay_of(learner)
        if relay is None or not self._turns.get(learner.session, True):
            return super()._dial(learner)
        if not learner.alive or not learner.courier or learner.connection is not None or learner.over:
            return False
        if learner.frozen or not learner.reachable or relay.paused or relay.cut:
            self.dial_later(learner, DIAL_S)
            return None
        syncer = self.world.syncer_at(learner)
        ready = relay.alive and relay.up and not relay.hidden and syncer is not None and not syncer.paused
        if not ready or syncer is None or not syncer.knows_relay(relay.session):
            learner.handle_event(learner_fx.Disconnected("connection refused"))
            self.dial_later(learner)
            return None
        self._backoff.pop(learner.session, None)
        self._connect(Connection(learner, syncer, relay))
        return None

    def _connect(self, connection: Connection) -> None:
        if connection.relay is not None:
            connection.relay.open_passage(connection)
        elif self.world.relay_of(connection.learner) is not None:
            self._look_later(connection)
        super()._connect(connection)

    def _look_later(self, connection: Connection) -> None:
        self.queue.call_later(RELAY_S * (0.5 + self.random.random()), self._look_for_relay, connection)

    def _look_for_relay(self, connection: Connection) -> object:
        """Hang up when the relay is there, with the syncer behind it."""
        learner: SimulatedLearner = connection.learner
        relay = self.world.relay_of(learner)
        if relay is None or learner.connection is not connection or not learner.alive or connection in self._ending:
            return False
        there = relay.alive and relay.up and not (relay.paused or relay.hidden or relay.cut)
        if learner.frozen or not learner.courier or not learner.reachable or not there:
            self._look_later(connection)
            return False
        self.reset_connection(learner, RELAY_BACK)
        self._turns[learner.session] = True
        return None

    # ---- bodies up ----------------------------------------------------------------------------------------------

    def find_break(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> str:
        """What is passed on takes the relay too."""
        relay = learner.connection.relay if learner.connection is not None else None
        if relay is not None and (relay.cut or not self._reaches(relay)):
            return "unreachable"
        return super().find_break(learner, syncer)

    def _reaches(self, relay: SimulatedRelay) -> bool:
        return relay.alive and not relay.paused and not relay.hidden

    def upload(self, learner: SimulatedLearner, number: int, attempt: int, payload: Payload) -> None:
        connection = learner.connection
        if connection is None or connection.relay is None:
            super().upload(learner, number, attempt, payload)
            return
        link = self.links.get(learner.name)
        through_at, seconds = link.pass_up(self.queue.now) if link else (self.queue.now + self.body_s, 0.0)
        at = connection.at(f"payload {number}", through_at + self.near_delay())
        key = (learner.name, number, attempt)
        self.queue.call_at(at, self._put_at_relay, learner, learner.machine, connection, key, payload, seconds)

    def _put_at_relay(
        self,
        learner: SimulatedLearner,
        machine: LearnerMachine,
        connection: Connection,
        key: ContributionKey,
        payload: Payload,
        seconds: float,
    ) -> object:
        """Let the relay take the body. `seconds`: how long it took on a link of a given width to the relay."""
        if learner.machine is not machine or not learner.alive:
            return False
        relay = connection.relay
        why = "" if self._reaches(relay) else "unreachable"
        why = why or ("it got stuck" if not learner.reachable else "")
        if not why and self.payload_loss and self.random.random() < self.payload_loss:
            why = "connection reset"
        if why:
            return self._fail_upload(learner, machine, key, why)
        digest = f"{payload.session} {payload.copy.fragment} {payload.copy.t}"
        if relay.is_newest(connection) and relay.hold_body(key, digest, payload):
            upload = HeldUpload(learner, machine, connection, relay.session, key, digest, seconds)
            self.queue.call_later(self.delay(), self._tell_held, upload, payload)
        else:
            above, args_on = relay.body_link, (learner, machine, connection.syncer, *key[1:], payload, seconds)
            through_at = above.pass_up(self.queue.now)[0] if above else self.queue.now + self.body_s
            self.queue.call_at(through_at + self.delay(), self._uploaded, *args_on)
        return None

    def _fail_upload(
        self, learner: SimulatedLearner, machine: LearnerMachine, key: ContributionKey, why: str
    ) -> object:
        failed = learner_fx.UploadFailed(*key[1:], why)
        self.queue.call_later(STUCK_S if why == "it got stuck" else 0.0, self.if_same, learner, machine, failed)
        return None

    def _tell_held(self, held: HeldUpload, payload: Payload) -> object:
        """The syncer hears what the relay holds; only then is the learner answered."""
        syncer, key = held.connection.syncer, held.key
        why = held.find_break()
        if not why and (not syncer.alive or syncer.paused):
            why = "unreachable"
        body = HeldBody(held.digest, 1.0)
        if not why and not syncer.receive_held(held.connection, held.session, key, body, payload):
            why = f"no contribution to round {key[1]} (attempt {key[2]}) is waited for"
        if why:
            return self._give_up_held(held, why)
        self.queue.call_later(self.delay() + self.near_delay(), self._confirm_held, held)
        return None

    def _confirm_held(self, held: HeldUpload) -> object:
        """The receipt is back at the relay, and then at the learner; or it is lost on the way."""
        if why := held.find_break():
            return self._give_up_held(held, f"no receipt: {why}")
        if held.relay.hidden or not held.learner.reachable:
            return self._fail_upload(held.learner, held.machine, held.key, "it got stuck")
        nbytes = round(self.links[held.learner.name].up_bytes) if held.seconds else 0
        uploaded = learner_fx.Uploaded(*held.key[1:], held.digest, nbytes=nbytes, seconds=held.seconds)
        return self.if_same(held.learner, held.machine, uploaded)

    def _give_up_held(self, held: HeldUpload, why: str) -> object:
        if held.is_of_this_life:
            held.relay.drop_body(held.key)
        return self._fail_upload(held.learner, held.machine, held.key, why)

    # ---- versions down ------------------------------------------------------------------------------------------

    def fetch(self, learner: SimulatedLearner, fragment: int) -> None:
        connection = learner.connection
        if connection is None or connection.relay is None:
            super().fetch(learner, fragment)
            return
        self.queue.call_later(self.near_delay(), self._ask_relay, self._request(learner, connection, fragment))

    def _request(self, learner: SimulatedLearner, connection: Connection, fragment: int) -> RelayedFetch:
        session = connection.relay.session
        return RelayedFetch(learner, learner.machine, connection, session, fragment, self.queue.now)

    def _ask_relay(self, request: RelayedFetch) -> object:
        learner, machine, connection, session, fragment, _ = request
        if learner.machine is not machine or not learner.alive:
            return False
        relay = connection.relay
        if not self._reaches(relay) or relay.session != session:
            return self._not_fetched(learner, machine, fragment, "unreachable")
        if (kept := relay.find_version(fragment)) is not None:
            self._serve_from_relay(request, *kept)
            return None
        body_s = 0.0 if relay.body_link else self.body_s
        self.queue.call_later(self.delay() + body_s, self._serve_relay, request)
        return None

    def _serve_from_relay(self, request: RelayedFetch, version: int, value: float) -> None:
        """Send what the relay keeps to the learner."""
        learner, machine, connection, _, fragment, asked_at = request
        args = (learner, machine, connection.syncer, fragment, version, value)
        if (link := self.links.get(learner.name)) is None:
            self.queue.call_later(self.near_delay() + self.body_s, self._fetched, *args)
            return
        through_at, seconds = link.pass_down(self.queue.now)
        arrives_at = through_at + self.near_delay()
        self.arrive_nearly(learner, link, arrives_at)
        figures = (round(link.down_bytes), seconds, arrives_at - seconds - asked_at)
        self.queue.call_at(arrives_at, self._fetched, *args, figures)

    def _serve_relay(self, request: RelayedFetch) -> object:
        """What was committed when the relay's request came; then it is back at the relay, and is kept there."""
        learner, machine, connection, _, fragment, _ = request
        syncer, relay = connection.syncer, connection.relay
        why = self.find_break(learner, syncer) or (
            "the run has no parameters yet" if syncer.served[fragment] < 0 else ""
        )
        if why:
            return self._not_fetched(learner, machine, fragment, why or "the run has no parameters yet")
        version, value = syncer.served[fragment], syncer.theta[fragment]
        above: SimulatedLink | None = relay.body_link
        through_at = relay.pass_version_down(above, fragment, version) if above else self.queue.now
        self.queue.call_at(through_at + self.delay(), self._keep_and_serve, request, version, value)
        return None

    def _keep_and_serve(self, request: RelayedFetch, version: int, value: float) -> object:
        learner, machine, connection, session, fragment, _ = request
        relay = connection.relay
        if not relay.alive or relay.session != session or relay.cut:
            return self._not_fetched(learner, machine, fragment, "unreachable")
        relay.keep_version(fragment, version, value)
        self._serve_from_relay(request, version, value)
        return None
