"""The network: control channels that keep their order, payloads beside them, and all that goes wrong with both.

A control channel is a TCP connection: in order, nothing lost while it lasts, and all that was on its way lost when it
breaks. Both ends may believe different things of it. A partition lets a connection stand: what is said into it is held
up, and comes in a burst if the partition ends before either end has given up. A learner gives up when its pings come
back from nowhere for NOTICE_S, the syncer when its rules say so. Payloads travel apart and may overtake control.
"""

from __future__ import annotations

from collections import deque
from math import isnan
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.messages import FromSyncer
from atoll.simulate.simulated_learner import NOT_FINITE

if TYPE_CHECKING:
    from atoll.simulate.simulated_learner import SimulatedLearner
    from atoll.simulate.simulated_syncer import SimulatedSyncer
    from atoll.simulate.world import World

NOTICE_S = 9.0
"""A learner's end notices within this time that nobody answers its pings."""
DIAL_S = 5.0
"""The most a dial waits for an answer."""
STUCK_S = 6.0
"""A payload that does not move is given up after this time."""
BACKOFF_S, BACKOFF_CAP_S = 0.1, 1.0


class Connection:
    __slots__ = ("arrives", "held_down", "held_up", "learner", "syncer")

    def __init__(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> None:
        self.learner, self.syncer = learner, syncer
        self.arrives: dict[str, float] = {}
        """Per way, when the last that was sent on it arrives."""
        self.held_up: deque[fx.SyncerEvent] = deque()
        self.held_down: deque[fx.LearnerEvent] = deque()

    def at(self, way: str, at: float) -> float:
        """In order: not before what was sent before it."""
        at = max(at, self.arrives.get(way, 0.0))
        self.arrives[way] = at
        return at


class Network:
    def __init__(self, world: World, latency_s: float, jitter: float) -> None:
        self.world, self.latency_s, self.jitter = world, latency_s, jitter
        self.random = world.random
        self.queue = world.queue
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
        self._backoff: dict[str, float] = {}

    def delay(self, times: float = 1.0) -> float:
        delay = times * self.slow * self.latency_s * (1 + self.jitter * self.random.random())
        return delay if delay < STUCK_S else STUCK_S

    # ---- control ------------------------------------------------------------------------------------------------

    def connect(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> None:
        """At once, with its hello."""
        learner.connection = connection = Connection(learner, syncer)
        syncer.greet(learner.name, connection, learner.machine.hello())
        if self.doubles and self.random.random() < self.doubles and learner.connection is connection:
            syncer.greet(learner.name, connection, learner.machine.hello())

    def up(self, learner: SimulatedLearner, event: fx.SyncerEvent, way: str = "up") -> None:
        connection = learner.connection
        if connection is not None:
            now = self.queue.now
            self.queue.call_later(connection.at(way, now + self.delay()) - now, self._come_up, connection, event)
            if self.doubles and self.random.random() < self.doubles:
                self.queue.call_later(connection.at(way, now) - now, self._come_up, connection, event)

    def _come_up(self, connection: Connection, event: fx.SyncerEvent) -> object:
        learner, syncer = connection.learner, connection.syncer
        if syncer.channels.get(learner.name) is not connection or not syncer.alive:
            return False
        if learner.blocked_up:
            connection.held_up.append(event)
            return None
        if isinstance(event, fx.Delivered):
            event = self._screened(syncer, event)
        return self.world.deliver(syncer, event)

    def _screened(self, syncer: SimulatedSyncer, event: fx.Delivered) -> fx.Delivered:
        given = event.contribution
        payload = syncer.payloads.get((event.learner, given.round, given.attempt), 0.0)
        return fx.Delivered(event.learner, given, NOT_FINITE) if isnan(payload) else event

    def down(self, syncer: SimulatedSyncer, name: str, message: FromSyncer) -> None:
        connection = syncer.channels.get(name)
        if connection is not None:
            now, event = self.queue.now, fx.Arrived(message)
            self.queue.call_later(connection.at("down", now + self.delay()) - now, self._come_down, connection, event)
            if self.doubles and self.random.random() < self.doubles:
                self.queue.call_later(connection.at("down", now) - now, self._come_down, connection, event)

    def _come_down(self, connection: Connection, event: fx.LearnerEvent) -> object:
        learner = connection.learner
        if learner.connection is not connection or not learner.alive or not learner.courier:
            return False
        if learner.blocked_down:
            connection.held_down.append(event)
            return None
        if isinstance(event, fx.Disconnected):
            return self.lost(learner, event.reason)
        return learner.handle_event(event)

    # ---- the ends of a connection -------------------------------------------------------------------------------

    def expel(self, syncer: SimulatedSyncer, name: str, reason: str) -> None:
        """The syncer closes it; what it sent before still comes."""
        if (connection := syncer.channels.pop(name, None)) is not None:
            self.queue.call_later(
                connection.at("down", self.queue.now + self.delay()) - self.queue.now,
                self._come_down,
                connection,
                fx.Disconnected(reason),
            )

    def reset(self, learner: SimulatedLearner, reason: str) -> None:
        """It breaks; the syncer hears of it if it can."""
        if (connection := learner.connection) is not None:
            self.closed_by(connection, reason)
            self.lost(learner, reason)

    def closed_by(self, connection: Connection, reason: str) -> None:
        """The learner's end is gone: the syncer hears of it once all that was said before has come."""
        name = connection.learner.name
        now = self.queue.now
        at = connection.at("up", now + self.delay())
        self.queue.call_later(at - now, self._come_up, connection, fx.Lost(name, reason))

    def lost(self, learner: SimulatedLearner, reason: str) -> object:
        """A learner's end is gone."""
        learner.connection = None
        learner.handle_event(fx.Disconnected(reason))
        self.dial_later(learner)
        return None

    def close_all(self, syncer: SimulatedSyncer, reason: str) -> None:
        """Its host says so to everybody that can be reached; the others notice."""
        connections, syncer.channels = syncer.channels, {}
        for connection in connections.values():
            self.queue.call_later(
                connection.at("down", self.queue.now) - self.queue.now,
                self._come_down,
                connection,
                fx.Disconnected(reason),
            )

    def disconnect(self, learner: SimulatedLearner, reason: str) -> None:
        if (connection := learner.connection) is not None:
            self.closed_by(connection, reason)
            learner.connection = None
            self.queue.call_later(0.0, learner.handle_event, fx.Disconnected(reason))
            self.dial_later(learner)

    def leave(self, learner: SimulatedLearner, reason: str) -> None:
        """It says goodbye and closes."""
        if (connection := learner.connection) is not None:
            for word in learner.machine.make_goodbye(reason):
                self.up(learner, fx.Received(learner.name, word))
            self.closed_by(connection, reason)
            learner.connection = None

    def goodbye(self, learner: SimulatedLearner) -> None:
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
        if syncer is None:
            learner.handle_event(fx.Disconnected("connection refused"))
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
        learner = connection.learner
        if learner.connection is not connection or (learner.reachable and not connection.syncer.paused):
            return False
        if learner.frozen:
            self.queue.call_later(NOTICE_S, self._notice, connection)
            return False
        self.closed_by(connection, "ping timeout")
        return self.lost(learner, "the syncer does not answer pings")

    def unblock(self, learner: SimulatedLearner, *, up: bool, down: bool) -> None:
        """What was held up comes in a burst, if its connection still stands."""
        learner.blocked_up = max(0, learner.blocked_up - up)
        learner.blocked_down = max(0, learner.blocked_down - down)
        for connection in self.world.connections(learner):
            while not learner.blocked_up and connection.held_up:
                self._come_up(connection, connection.held_up.popleft())
            while not learner.blocked_down and connection.held_down:
                self._come_down(connection, connection.held_down.popleft())

    def silent(self, syncer: SimulatedSyncer) -> None:
        """A syncer that stands still answers no pings."""
        for connection in list(syncer.channels.values()):
            self.queue.call_later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)
