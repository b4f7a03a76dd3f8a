"""Bodies: fragments on connections of their own. One that breaks or gets stuck is told to the machine that sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.learner.machine import Learner
from atoll.simulate.network import STUCK_S, Network
from atoll.simulate.oracle import Body

if TYPE_CHECKING:
    from atoll.simulate.island import Island
    from atoll.simulate.network import Connection
    from atoll.simulate.reign import Reign

INITIAL_AGAIN_S = 1.0


class Bodies(Network):
    """The network with its bodies."""

    def _breaks(self, island: Island, reign: Reign) -> str:
        """Why a body does not come through, if it does not."""
        if not reign.alive or reign.paused:
            return "unreachable"
        if not island.reachable:
            return "it got stuck"
        return "connection reset" if self.body_loss and self.random.random() < self.body_loss else ""

    # ---- up -----------------------------------------------------------------------------------------------------

    def upload(self, island: Island, number: int, attempt: int, body: Body) -> None:
        connection = island.connection
        if connection is not None:
            now = self.agenda.now
            at = connection.at(f"body {number}", now + self.delay())
            args = (island, island.machine, connection.reign, number, attempt, body)
            self.agenda.later(at - now, self._uploaded, *args)

    def _uploaded(
        self, island: Island, machine: Learner, reign: Reign, number: int, attempt: int, body: Body
    ) -> object:
        if island.machine is not machine or not island.alive:
            return False
        why = self._breaks(island, reign)
        if not why and not reign.receive((island.name, number, attempt), body):
            why = f"no contribution to round {number} (attempt {attempt}) is waited for"
        if why:
            stuck = STUCK_S if why == "it got stuck" else 0.0
            self.agenda.later(stuck, self.if_same, island, machine, fx.UploadFailed(number, attempt, why))
        elif self.apart:
            self.agenda.later(self.delay(), self._received, island, machine, reign, number, attempt)
        else:
            return self._received(island, machine, reign, number, attempt)
        return None

    def _received(self, island: Island, machine: Learner, reign: Reign, number: int, attempt: int) -> object:
        """Its receipt is back, or lost: then the syncer has what its learner believes it has not."""
        if self.apart and (why := self._breaks(island, reign)):
            return self.if_same(island, machine, fx.UploadFailed(number, attempt, f"no receipt: {why}"))
        return self.if_same(island, machine, fx.Uploaded(number, attempt, "digest"))

    def upload_all(self, island: Island) -> None:
        """Version 0; sent again and again until it is there, or the connection is gone."""
        if (connection := island.connection) is not None:
            now = self.agenda.now
            self.agenda.later(connection.at("body", now + self.delay()) - now, self._initial, connection)

    def _initial(self, connection: Connection) -> object:
        island, reign = connection.island, connection.reign
        if island.connection is not connection or not island.alive or reign.machine.phase != "empty":
            return False
        if not island.answers or self._breaks(island, reign):
            self.agenda.later(INITIAL_AGAIN_S, self._initial, connection)
            return None
        reign.initial = list(island.base)
        return self.world.tell(reign, fx.Initialised(island.name))

    # ---- down ---------------------------------------------------------------------------------------------------

    def fetch(self, island: Island, fragment: int) -> None:
        """The request travels, then what was committed when it came."""
        connection, machine = island.connection, island.machine
        delay = self.delay(1.0 if self.apart else 2.0)
        if connection is not None:
            self.agenda.later(delay, self._serve, island, machine, connection.reign, fragment)
        else:
            self.agenda.later(delay, self.if_same, island, machine, fx.FetchFailed(fragment, "unreachable"))

    def _serve(self, island: Island, machine: Learner, reign: Reign, fragment: int) -> object:
        if island.machine is not machine or not island.alive:
            return False
        why = self._breaks(island, reign) or ("the run has no parameters yet" if reign.served[fragment] < 0 else "")
        if why:
            return self._not_fetched(island, machine, fragment, why)
        value, version = reign.theta[fragment], reign.served[fragment]
        if not self.apart:
            return self._fetched(island, machine, reign, fragment, version, value)
        self.agenda.later(self.delay(), self._fetched, island, machine, reign, fragment, version, value)
        return None

    def _fetched(
        self, island: Island, machine: Learner, reign: Reign, fragment: int, version: int, value: float
    ) -> object:
        if island.machine is not machine or not island.alive:
            return False
        if self.apart and (why := self._breaks(island, reign)):
            return self._not_fetched(island, machine, fragment, why)
        island.fetched[fragment] = value
        return island.hear(fx.Fetched(fragment, version))

    def _not_fetched(self, island: Island, machine: Learner, fragment: int, why: str) -> object:
        stuck = STUCK_S if why == "it got stuck" else 0.0
        self.agenda.later(stuck, self.if_same, island, machine, fx.FetchFailed(fragment, why))
        return None

    def if_same(self, island: Island, machine: Learner, event: fx.LearnerEvent) -> object:
        return island.hear(event) if island.machine is machine else False
