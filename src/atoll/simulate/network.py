"""The network: control channels that keep their order, payloads (fragments) on connections of their own, and the faults
of both.

A control channel is a TCP connection: in order, nothing lost while it lasts, and all that was on its way lost when it
breaks. Both ends may believe different things of it. A partition lets a connection stand: what is said into it is held
up, and comes in a burst if the partition ends before either end has given up. A learner gives up when its pings come
back from nowhere for NOTICE_S, the syncer when its rules say so. Payloads may overtake control messages; the sender's
machine is told of one that breaks or gets stuck.
"""

from __future__ import annotations

import random
from math import isnan
from typing import Protocol

from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import FromSyncer
from atoll.protocol.syncer import effects as syncer_fx
from atoll.simulate.links import SimulatedLink
from atoll.simulate.simulated_learner import NOT_FINITE, SimulatedLearner
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer
from atoll.simulate.training import Payload
from atoll.simulate.virtual_time import EventQueue

NOTICE_S = 9.0
"""A learner's end notices within this time that nobody answers its pings."""
DIAL_S = 5.0
"""The most a dial waits for an answer."""
STUCK_S = 6.0
"""A payload that does not move is given up after this time."""
BACKOFF_S, BACKOFF_CAP_S = 0.1, 1.0
INITIAL_AGAIN_S = 1.0
WRONG_BODY = "its body is not the one its message names"


class NetworkWorld(Protocol):
    """What the network needs of the world around it."""

    random: random.Random
    queue: EventQueue

    def deliver(
        self, syncer: SimulatedSyncer, event: syncer_fx.SyncerEvent, least: float = 0.0
    ) -> list[syncer_fx.SyncerEffect]: ...

    def connections(self, learner: SimulatedLearner) -> list[Connection]: ...

    def syncer_at(self, learner: SimulatedLearner) -> SimulatedSyncer | None: ...


class Network:
    def __init__(self, world: NetworkWorld, latency_s: float, jitter: float) -> None:
        self.world, self.latency_s, self.jitter = world, latency_s, jitter
        self.random = world.random
        self.queue = world.queue
        self.body_s = 0.0
        """What a fragment's own bytes take, each way, beside the delay; several travel side by side."""
        self.slow = 1.0
        """Clogged links: delays are so many times longer."""
        self.payload_loss = 0.0
        """The share of payloads that break on their way."""
        self.doubles = 0.0
        """The share of control messages that come twice."""
        self.apart = False
        """Whether a request and its answer travel one after the other, so that things may happen in between."""
        self.redials = False
        """Whether a learner that lost its syncer dials again by itself."""
        self.links: dict[str, SimulatedLink] = {}
        """Links of a given width, by learner. Without one, bodies travel side by side."""
        self.link_s = 0.0
        """Longest time that a body takes on one of these links."""
        self._backoff: dict[str, float] = {}

    @property
    def longest_s(self) -> float:
        """The most that a message or a fragment is on its way, in peace."""
        return self.latency_s * (1 + self.jitter) + self.body_s + self.link_s

    def delay(self, times: float = 1.0) -> float:
        delay = times * self.slow * self.latency_s * (1 + self.jitter * self.random.random())
        return delay if delay < STUCK_S else STUCK_S

    # ---- control ------------------------------------------------------------------------------------------------

    def connect(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> None:
        """At once, with its hello."""
        self._connect(Connection(learner, syncer))

    def _connect(self, connection: Connection) -> None:
        learner, syncer = connection.learner, connection.syncer
        learner.connection = connection
        syncer.greet(learner.name, connection, learner.machine.hello())
        if self.doubles and self.random.random() < self.doubles and learner.connection is connection:
            syncer.greet(learner.name, connection, learner.machine.hello())

    def send_up(self, learner: SimulatedLearner, event: syncer_fx.SyncerEvent, way: str = "up") -> None:
        connection = learner.connection
        if connection is not None:
            now = self.queue.now
            self.queue.call_at(connection.at(way, now + self.delay()), self._come_up, connection, event)
            if self.doubles and self.random.random() < self.doubles:
                self.queue.call_at(connection.at(way, now), self._come_up, connection, event)

    def _come_up(self, connection: Connection, event: syncer_fx.SyncerEvent) -> object:
        learner: SimulatedLearner = connection.learner
        syncer = connection.syncer
        if syncer.channels.get(learner.name) is not connection or not syncer.alive:
            return False
        if learner.blocked_up:
            connection.held_up.append(event)
            return None
        return self._hear_up(syncer, event)

    def _hear_up(self, syncer: SimulatedSyncer, event: syncer_fx.SyncerEvent) -> object:
        if isinstance(event, syncer_fx.Delivered):
            event = self._screened(syncer, event)
        return self.world.deliver(syncer, event)

    def _screened(self, syncer: SimulatedSyncer, event: syncer_fx.Delivered) -> syncer_fx.Delivered:
        given = event.contribution
        key = (event.learner, given.round, given.attempt)
        if syncer.digests.get(key, given.digest) != given.digest:
            return syncer_fx.Delivered(event.learner, given, WRONG_BODY)
        payload = syncer.payloads.get(key, 0.0)
        return syncer_fx.Delivered(event.learner, given, NOT_FINITE) if isnan(payload) else event

    def send_down(self, syncer: SimulatedSyncer, name: str, message: FromSyncer) -> None:
        connection = syncer.channels.get(name)
        if connection is not None:
            event = learner_fx.Arrived(message)
            self._pass_down(connection, event, self.delay())
            if self.doubles and self.random.random() < self.doubles:
                self._pass_down(connection, event, 0.0)

    def _pass_down(self, connection: Connection, event: learner_fx.LearnerEvent, delay_s: float) -> None:
        at = connection.at("down", self.queue.now + delay_s)
        self.queue.call_at(at, self._come_down, connection, event)

    def _come_down(self, connection: Connection, event: learner_fx.LearnerEvent) -> object:
        learner: SimulatedLearner = connection.learner
        if learner.connection is not connection or not learner.alive or not learner.courier:
            return False
        if learner.blocked_down:
            connection.held_down.append(event)
            return None
        if isinstance(event, learner_fx.Disconnected):
            return self.lose_connection(learner, event.reason)
        return learner.handle_event(event)

    # ---- the ends of a connection -------------------------------------------------------------------------------

    def expel_learner(self, syncer: SimulatedSyncer, name: str, reason: str) -> None:
        """The syncer closes it; what it sent before still comes."""
        if (connection := syncer.channels.pop(name, None)) is not None:
            self._pass_down(connection, learner_fx.Disconnected(reason), self.delay())

    def reset_connection(self, learner: SimulatedLearner, reason: str) -> None:
        """It breaks; the syncer hears of it if it can."""
        if (connection := learner.connection) is not None:
            self.closed_by(connection, reason)
            self.lose_connection(learner, reason)

    def closed_by(self, connection: Connection, reason: str) -> None:
        """The learner's end is gone: the syncer hears of it once all that was said before has come."""
        name: str = connection.learner.name
        at = connection.at("up", self.queue.now + self.delay())
        self.queue.call_at(at, self._come_up, connection, syncer_fx.Lost(name, reason))

    def lose_connection(self, learner: SimulatedLearner, reason: str) -> object:
        """A learner's end is gone."""
        learner.connection = None
        learner.handle_event(learner_fx.Disconnected(reason))
        self.dial_later(learner)
        return None

    def close_all(self, syncer: SimulatedSyncer, reason: str) -> None:
        """Its host says so to everybody that can be reached; the others notice."""
        connections, syncer.channels = syncer.channels, {}
        for connection in connections.values():
            self._pass_down(connection, learner_fx.Disconnected(reason), 0.0)

    def disconnect(self, learner: SimulatedLearner, reason: str) -> None:
        if (connection := learner.connection) is not None:
            self.closed_by(connection, reason)
            learner.connection = None
            self.queue.call_later(0.0, learner.handle_event, learner_fx.Disconnected(reason))
            self.dial_later(learner)

    def say_goodbye(self, learner: SimulatedLearner, reason: str) -> None:
        """It says goodbye and closes."""
        if (connection := learner.connection) is not None:
            for word in learner.machine.make_goodbye(reason):
                self.send_up(learner, syncer_fx.Received(learner.name, word))
            self.closed_by(connection, reason)
            learner.connection = None

    def close_finished(self, learner: SimulatedLearner) -> None:
        """Nothing more will be asked of it."""
        if self.redials and (connection := learner.connection) is not None:
            self.closed_by(connection, "the run is over")
            learner.connection = None

    # ---- dialling -----------------------------------------------------------------------------------------------

    def dial_later(self, learner: SimulatedLearner, wait_s: float = 0.0) -> None:
        if self.redials:
            backoff = self._backoff.get(learner.session, BACKOFF_S)
            self._backoff[learner.session] = min(2 * backoff, BACKOFF_CAP_S)
            self.queue.call_later(wait_s + backoff * self.random.random() + self.delay(2.0), self._dial, learner)

    def _dial(self, learner: SimulatedLearner) -> object:
        if not learner.alive or not learner.courier or learner.connection is not None or learner.over:
            return False
        syncer = self.world.syncer_at(learner)
        if learner.frozen or not learner.reachable or (syncer is not None and syncer.paused):
            self.dial_later(learner, DIAL_S)
            return None
        if syncer is None or syncer.refuses_learners:
            learner.handle_event(learner_fx.Disconnected("connection refused"))
            self.dial_later(learner)
            return None
        self._backoff.pop(learner.session, None)
        self.connect(learner, syncer)
        return None

    # ---- partitions ---------------------------------------------------------------------------------------------

    def block(self, learner: SimulatedLearner, *, up: bool, down: bool) -> None:
        learner.blocked_up += up
        learner.blocked_down += down
        if (connection := learner.connection) is not None:
            self.queue.call_later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)

    def _notice(self, connection: Connection) -> object:
        """Pings go unanswered, whichever way is blocked."""
        learner: SimulatedLearner = connection.learner
        if learner.connection is not connection or (learner.reachable and not connection.syncer.paused):
            return False
        if learner.frozen:
            self.queue.call_later(NOTICE_S, self._notice, connection)
            return False
        self.closed_by(connection, "ping timeout")
        return self.lose_connection(learner, "the syncer does not answer pings")

    def unblock(self, learner: SimulatedLearner, *, up: bool, down: bool) -> None:
        """What was held up comes in a burst, if its connection still stands."""
        learner.blocked_up = max(0, learner.blocked_up - up)
        learner.blocked_down = max(0, learner.blocked_down - down)
        for connection in self.world.connections(learner):
            while not learner.blocked_up and connection.held_up:
                self._come_up(connection, connection.held_up.popleft())
            while not learner.blocked_down and connection.held_down:
                self._come_down(connection, connection.held_down.popleft())

    def stop_pings(self, syncer: SimulatedSyncer) -> None:
        """A syncer that stands still answers no pings."""
        for connection in list(syncer.channels.values()):
            self.queue.call_later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)

    # ---- payloads, on connections of their own --------------------------------------------------------------------

    def find_break(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> str:
        """Why a payload does not come through, if it does not."""
        if not syncer.alive or syncer.paused:
            return "unreachable"
        if not learner.reachable:
            return "it got stuck"
        return "connection reset" if self.payload_loss and self.random.random() < self.payload_loss else ""

    # ---- payloads up -------------------------------------------------------------------------------------------------

    def upload(self, learner: SimulatedLearner, number: int, attempt: int, payload: Payload) -> None:
        connection = learner.connection
        if connection is not None:
            link = self.links.get(learner.name)
            through_at, seconds = link.pass_up(self.queue.now) if link else (self.queue.now + self.body_s, 0.0)
            at = connection.at(f"payload {number}", through_at + self.delay())
            args = (learner, learner.machine, connection.syncer, number, attempt, payload, seconds)
            self.queue.call_at(at, self._uploaded, *args)

    def _uploaded(
        self,
        learner: SimulatedLearner,
        machine: LearnerMachine,
        syncer: SimulatedSyncer,
        number: int,
        attempt: int,
        payload: Payload,
        seconds: float = 0.0,
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        why = self.find_break(learner, syncer)
        if not why and not syncer.receive((learner.name, number, attempt), payload):
            why = f"no contribution to round {number} (attempt {attempt}) is waited for"
        if why:
            stuck = STUCK_S if why == "it got stuck" else 0.0
            self.queue.call_later(stuck, self.if_same, learner, machine, learner_fx.UploadFailed(number, attempt, why))
        elif self.apart:
            self.queue.call_later(self.delay(), self._received, learner, machine, syncer, number, attempt, seconds)
        else:
            return self._received(learner, machine, syncer, number, attempt, seconds)
        return None

    def _received(
        self,
        learner: SimulatedLearner,
        machine: LearnerMachine,
        syncer: SimulatedSyncer,
        number: int,
        attempt: int,
        seconds: float = 0.0,
    ) -> object:
        """Its receipt is back, or lost: then the syncer has what its learner believes it has not."""
        if self.apart and (why := self.find_break(learner, syncer)):
            return self.if_same(learner, machine, learner_fx.UploadFailed(number, attempt, f"no receipt: {why}"))
        nbytes = round(self.links[learner.name].up_bytes) if seconds else 0
        uploaded = learner_fx.Uploaded(number, attempt, "digest", nbytes=nbytes, seconds=seconds)
        return self.if_same(learner, machine, uploaded)

    def upload_all(self, learner: SimulatedLearner) -> None:
        """Version 0; sent again and again until it is there, or the connection is gone."""
        if (connection := learner.connection) is None:
            return
        through_at, link = self.queue.now, self.links.get(learner.name)
        if link is not None and link.first_bytes:
            through_at, _ = link.pass_up(self.queue.now, learner.fragments * link.first_bytes / link.up_bytes)
        self.queue.call_at(connection.at("payload", through_at + self.delay()), self._initial, connection)

    def _initial(self, connection: Connection) -> object:
        learner: SimulatedLearner = connection.learner
        syncer = connection.syncer
        if learner.connection is not connection or not learner.alive or syncer.machine.phase != "empty":
            return False
        if not learner.answers or self.find_break(learner, syncer):
            self.queue.call_later(INITIAL_AGAIN_S, self._initial, connection)
            return None
        known = syncer.machine.members.learners.get(learner.name)
        if known is None or known.session != learner.session:
            return False  # another process has the name by now, and the syncer refuses this one's body
        return syncer.take_initial(learner.name, learner.session, list(learner.base))

    # ---- payloads down -----------------------------------------------------------------------------------------------

    def fetch(self, learner: SimulatedLearner, fragment: int) -> None:
        """The request travels, then what was committed when it came."""
        connection, machine = learner.connection, learner.machine
        link = self.links.get(learner.name)
        delay = self.delay(1.0 if self.apart or link else 2.0) + (0.0 if link else self.body_s) + learner.fetch_s
        if connection is not None and link is not None:
            args = (learner, machine, connection.syncer, fragment, link, self.queue.now)
            self.queue.call_later(delay, self._serve_by_link, *args)
        elif connection is not None:
            self.queue.call_later(delay, self._serve, learner, machine, connection.syncer, fragment)
        else:
            self.queue.call_later(
                delay, self.if_same, learner, machine, learner_fx.FetchFailed(fragment, "unreachable")
            )

    def _serve(
        self, learner: SimulatedLearner, machine: LearnerMachine, syncer: SimulatedSyncer, fragment: int
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        why = self.find_break(learner, syncer) or (
            "the run has no parameters yet" if syncer.served[fragment] < 0 else ""
        )
        if why:
            return self._not_fetched(learner, machine, fragment, why)
        value, version = syncer.theta[fragment], syncer.served[fragment]
        if not self.apart:
            return self._fetched(learner, machine, syncer, fragment, version, value)
        self.queue.call_later(self.delay(), self._fetched, learner, machine, syncer, fragment, version, value)
        return None

    def _serve_by_link(
        self,
        learner: SimulatedLearner,
        machine: LearnerMachine,
        syncer: SimulatedSyncer,
        fragment: int,
        link: SimulatedLink,
        asked_at: float,
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        if why := self.find_break(learner, syncer) or ("no parameters" if syncer.served[fragment] < 0 else ""):
            return self._not_fetched(learner, machine, fragment, why)
        value, version = syncer.theta[fragment], syncer.served[fragment]
        nbytes = link.first_bytes if version == 0 and link.first_bytes else link.down_bytes
        through_at, seconds = link.pass_down(self.queue.now, nbytes / link.down_bytes)
        arrives_at = through_at + self.delay()
        self.arrive_nearly(learner, link, arrives_at)
        figures = (round(nbytes), seconds, arrives_at - seconds - asked_at)
        self.queue.call_at(arrives_at, self._fetched, learner, machine, syncer, fragment, version, value, figures)
        return None

    def arrive_nearly(self, learner: SimulatedLearner, link: SimulatedLink, arrives_at: float) -> None:
        """Let the learner order its next version once all that is still to come of this one is on the link."""
        nearly_at = arrives_at - learner.machine.ways.pipe_bytes / link.down_rate
        at = max(self.queue.now, nearly_at)
        self.queue.call_at(at, self.if_same, learner, learner.machine, learner_fx.Arriving())

    def _fetched(
        self,
        learner: SimulatedLearner,
        machine: LearnerMachine,
        syncer: SimulatedSyncer,
        fragment: int,
        version: int,
        value: float,
        figures: tuple[int, float, float] = (0, 0.0, 0.0),
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        if self.apart and (why := self.find_break(learner, syncer)):
            return self._not_fetched(learner, machine, fragment, why)
        learner.fetched[fragment] = value
        if version == 0 and (link := self.links.get(learner.name)) is not None and link.first_bytes:
            lacking = sum(held < 0 and other != fragment for other, held in enumerate(machine.versions))
            learner.handle_event(learner_fx.Lacking(round(lacking * link.first_bytes)))
        return learner.handle_event(learner_fx.Fetched(fragment, version, *figures))

    def _not_fetched(self, learner: SimulatedLearner, machine: LearnerMachine, fragment: int, why: str) -> object:
        stuck = STUCK_S if why == "it got stuck" else 0.0
        self.queue.call_later(stuck, self.if_same, learner, machine, learner_fx.FetchFailed(fragment, why))
        return None

    def if_same(self, learner: SimulatedLearner, machine: LearnerMachine, event: learner_fx.LearnerEvent) -> object:
        return learner.handle_event(event) if learner.machine is machine else False
