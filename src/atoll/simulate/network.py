"""The network: control channels that keep their order, bodies beside them, and all that goes wrong with both.

A control channel is a TCP connection: in order, nothing lost while it lasts, and all that was on its way lost when it
breaks. Both ends may believe different things of it. A partition lets a connection stand: what is said into it is held
up, and comes in a burst if the partition ends before either end has given up. A learner gives up when its pings come
back from nowhere for NOTICE_S, the syncer when its rules say so. Bodies travel apart and may overtake control.
"""

from __future__ import annotations

from collections import deque
from math import isnan
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.messages import FromSyncer
from atoll.simulate.island import NOT_FINITE

if TYPE_CHECKING:
    from atoll.simulate.island import Island
    from atoll.simulate.reign import Reign
    from atoll.simulate.world import World

NOTICE_S = 9.0
"""A learner's end notices within this time that nobody answers its pings."""
DIAL_S = 5.0
"""The most a dial waits for an answer."""
STUCK_S = 6.0
"""A body that does not move is given up after this time."""
BACKOFF_S, BACKOFF_CAP_S = 0.1, 1.0


class Connection:
    __slots__ = ("arrives", "backoff_s", "held_down", "held_up", "island", "reign")

    def __init__(self, island: Island, reign: Reign) -> None:
        self.island, self.reign = island, reign
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
        self.agenda = world.agenda
        self.slow = 1.0
        """Clogged links: delays are so many times longer."""
        self.body_loss = 0.0
        """The share of bodies that break on their way."""
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

    def connect(self, island: Island, reign: Reign) -> None:
        """At once, with its hello."""
        island.connection = connection = Connection(island, reign)
        reign.greet(island.name, connection, island.machine.hello())
        if self.doubles and self.random.random() < self.doubles and island.connection is connection:
            reign.greet(island.name, connection, island.machine.hello())

    def up(self, island: Island, event: fx.SyncerEvent, way: str = "up") -> None:
        connection = island.connection
        if connection is not None:
            now = self.agenda.now
            self.agenda.later(connection.at(way, now + self.delay()) - now, self._come_up, connection, event)
            if self.doubles and self.random.random() < self.doubles:
                self.agenda.later(connection.at(way, now) - now, self._come_up, connection, event)

    def _come_up(self, connection: Connection, event: fx.SyncerEvent) -> object:
        island, reign = connection.island, connection.reign
        if reign.channels.get(island.name) is not connection or not reign.alive:
            return False
        if island.blocked_up:
            connection.held_up.append(event)
            return None
        if isinstance(event, fx.Delivered):
            event = self._screened(reign, event)
        return self.world.tell(reign, event)

    def _screened(self, reign: Reign, event: fx.Delivered) -> fx.Delivered:
        given = event.contribution
        body = reign.bodies.get((event.learner, given.round, given.attempt), 0.0)
        return fx.Delivered(event.learner, given, NOT_FINITE) if isnan(body) else event

    def down(self, reign: Reign, name: str, message: FromSyncer) -> None:
        connection = reign.channels.get(name)
        if connection is not None:
            now, event = self.agenda.now, fx.Arrived(message)
            self.agenda.later(connection.at("down", now + self.delay()) - now, self._come_down, connection, event)
            if self.doubles and self.random.random() < self.doubles:
                self.agenda.later(connection.at("down", now) - now, self._come_down, connection, event)

    def _come_down(self, connection: Connection, event: fx.LearnerEvent) -> object:
        island = connection.island
        if island.connection is not connection or not island.alive or not island.courier:
            return False
        if island.blocked_down:
            connection.held_down.append(event)
            return None
        if isinstance(event, fx.Disconnected):
            return self.lost(island, event.reason)
        return island.hear(event)

    # ---- the ends of a connection -------------------------------------------------------------------------------

    def expel(self, reign: Reign, name: str, reason: str) -> None:
        """The syncer closes it; what it sent before still comes."""
        if (connection := reign.channels.pop(name, None)) is not None:
            self.agenda.later(
                connection.at("down", self.agenda.now + self.delay()) - self.agenda.now,
                self._come_down,
                connection,
                fx.Disconnected(reason),
            )

    def reset(self, island: Island, reason: str) -> None:
        """It breaks; the syncer hears of it if it can."""
        if (connection := island.connection) is not None:
            self.closed_by(connection, reason)
            self.lost(island, reason)

    def closed_by(self, connection: Connection, reason: str) -> None:
        """The learner's end is gone: the syncer hears of it once all that was said before has come."""
        name = connection.island.name
        now = self.agenda.now
        at = connection.at("up", now + self.delay())
        self.agenda.later(at - now, self._come_up, connection, fx.Lost(name, reason))

    def lost(self, island: Island, reason: str) -> object:
        """A learner's end is gone."""
        island.connection = None
        island.hear(fx.Disconnected(reason))
        self.dial_later(island)
        return None

    def syncer_gone(self, reign: Reign, reason: str) -> None:
        """Its host says so to everybody that can be reached; the others notice."""
        connections, reign.channels = reign.channels, {}
        for connection in connections.values():
            self.agenda.later(
                connection.at("down", self.agenda.now) - self.agenda.now,
                self._come_down,
                connection,
                fx.Disconnected(reason),
            )

    def hang_up(self, island: Island, reason: str) -> None:
        if (connection := island.connection) is not None:
            self.closed_by(connection, reason)
            island.connection = None
            self.agenda.later(0.0, island.hear, fx.Disconnected(reason))
            self.dial_later(island)

    def leave(self, island: Island, reason: str) -> None:
        """It says goodbye and closes."""
        if (connection := island.connection) is not None:
            for word in island.machine.make_goodbye(reason):
                self.up(island, fx.Received(island.name, word))
            self.closed_by(connection, reason)
            island.connection = None

    def goodbye(self, island: Island) -> None:
        """Nothing more will be asked of it."""
        if self.redials and (connection := island.connection) is not None:
            self.closed_by(connection, "the run is over")
            island.connection = None

    # ---- dialling -----------------------------------------------------------------------------------------------

    def dial_later(self, island: Island, wait_s: float = 0.0) -> None:
        if self.redials:
            backoff = self._backoff.get(island.session, BACKOFF_S)
            self._backoff[island.session] = min(2 * backoff, BACKOFF_CAP_S)
            self.agenda.later(wait_s + backoff * self.random.random() + self.delay(2.0), self._dial, island)

    def _dial(self, island: Island) -> object:
        if not island.alive or not island.courier or island.connection is not None or island.over:
            return False
        reign = self.world.syncer_at(island)
        if island.frozen or not island.reachable or (reign is not None and reign.paused):
            self.dial_later(island, DIAL_S)
            return None
        if reign is None:
            island.hear(fx.Disconnected("connection refused"))
            self.dial_later(island)
            return None
        self._backoff.pop(island.session, None)
        self.connect(island, reign)
        return None

    # ---- partitions ---------------------------------------------------------------------------------------------

    def block(self, island: Island, *, up: bool, down: bool) -> None:
        island.blocked_up += up
        island.blocked_down += down
        if (connection := island.connection) is not None:
            self.agenda.later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)

    def _notice(self, connection: Connection) -> object:
        """Pings go unanswered, whichever way is blocked."""
        island = connection.island
        if island.connection is not connection or (island.reachable and not connection.reign.paused):
            return False
        if island.frozen:
            self.agenda.later(NOTICE_S, self._notice, connection)
            return False
        self.closed_by(connection, "ping timeout")
        return self.lost(island, "the syncer does not answer pings")

    def unblock(self, island: Island, *, up: bool, down: bool) -> None:
        """What was held up comes in a burst, if its connection still stands."""
        island.blocked_up = max(0, island.blocked_up - up)
        island.blocked_down = max(0, island.blocked_down - down)
        for connection in self.world.connections(island):
            while not island.blocked_up and connection.held_up:
                self._come_up(connection, connection.held_up.popleft())
            while not island.blocked_down and connection.held_down:
                self._come_down(connection, connection.held_down.popleft())

    def silent(self, reign: Reign) -> None:
        """A syncer that stands still answers no pings."""
        for connection in list(reign.channels.values()):
            self.agenda.later(NOTICE_S * self.random.uniform(0.5, 1.0), self._notice, connection)
