"""Payloads: fragments on connections of their own. The sender's machine is told of one that breaks or gets stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol.learner.machine import Learner
from atoll.simulate.network import STUCK_S, Network
from atoll.simulate.oracle import Payload

if TYPE_CHECKING:
    from atoll.simulate.network import Connection
    from atoll.simulate.simulated_learner import SimulatedLearner
    from atoll.simulate.simulated_syncer import SimulatedSyncer

INITIAL_AGAIN_S = 1.0


class PayloadNetwork(Network):
    """The network, with control channels and payloads."""

    def _breaks(self, learner: SimulatedLearner, syncer: SimulatedSyncer) -> str:
        """Why a payload does not come through, if it does not."""
        if not syncer.alive or syncer.paused:
            return "unreachable"
        if not learner.reachable:
            return "it got stuck"
        return "connection reset" if self.payload_loss and self.random.random() < self.payload_loss else ""

    # ---- up -----------------------------------------------------------------------------------------------------

    def upload(self, learner: SimulatedLearner, number: int, attempt: int, payload: Payload) -> None:
        connection = learner.connection
        if connection is not None:
            now = self.queue.now
            at = connection.at(f"payload {number}", now + self.delay())
            args = (learner, learner.machine, connection.syncer, number, attempt, payload)
            self.queue.call_later(at - now, self._uploaded, *args)

    def _uploaded(
        self,
        learner: SimulatedLearner,
        machine: Learner,
        syncer: SimulatedSyncer,
        number: int,
        attempt: int,
        payload: Payload,
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        why = self._breaks(learner, syncer)
        if not why and not syncer.receive((learner.name, number, attempt), payload):
            why = f"no contribution to round {number} (attempt {attempt}) is waited for"
        if why:
            stuck = STUCK_S if why == "it got stuck" else 0.0
            self.queue.call_later(stuck, self.if_same, learner, machine, fx.UploadFailed(number, attempt, why))
        elif self.apart:
            self.queue.call_later(self.delay(), self._received, learner, machine, syncer, number, attempt)
        else:
            return self._received(learner, machine, syncer, number, attempt)
        return None

    def _received(
        self, learner: SimulatedLearner, machine: Learner, syncer: SimulatedSyncer, number: int, attempt: int
    ) -> object:
        """Its receipt is back, or lost: then the syncer has what its learner believes it has not."""
        if self.apart and (why := self._breaks(learner, syncer)):
            return self.if_same(learner, machine, fx.UploadFailed(number, attempt, f"no receipt: {why}"))
        return self.if_same(learner, machine, fx.Uploaded(number, attempt, "digest"))

    def upload_all(self, learner: SimulatedLearner) -> None:
        """Version 0; sent again and again until it is there, or the connection is gone."""
        if (connection := learner.connection) is not None:
            now = self.queue.now
            self.queue.call_later(connection.at("payload", now + self.delay()) - now, self._initial, connection)

    def _initial(self, connection: Connection) -> object:
        learner, syncer = connection.learner, connection.syncer
        if learner.connection is not connection or not learner.alive or syncer.machine.phase != "empty":
            return False
        if not learner.answers or self._breaks(learner, syncer):
            self.queue.call_later(INITIAL_AGAIN_S, self._initial, connection)
            return None
        syncer.initial = list(learner.base)
        return self.world.deliver(syncer, fx.Initialised(learner.name))

    # ---- down ---------------------------------------------------------------------------------------------------

    def fetch(self, learner: SimulatedLearner, fragment: int) -> None:
        """The request travels, then what was committed when it came."""
        connection, machine = learner.connection, learner.machine
        delay = self.delay(1.0 if self.apart else 2.0)
        if connection is not None:
            self.queue.call_later(delay, self._serve, learner, machine, connection.syncer, fragment)
        else:
            self.queue.call_later(delay, self.if_same, learner, machine, fx.FetchFailed(fragment, "unreachable"))

    def _serve(self, learner: SimulatedLearner, machine: Learner, syncer: SimulatedSyncer, fragment: int) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        why = self._breaks(learner, syncer) or ("the run has no parameters yet" if syncer.served[fragment] < 0 else "")
        if why:
            return self._not_fetched(learner, machine, fragment, why)
        value, version = syncer.theta[fragment], syncer.served[fragment]
        if not self.apart:
            return self._fetched(learner, machine, syncer, fragment, version, value)
        self.queue.call_later(self.delay(), self._fetched, learner, machine, syncer, fragment, version, value)
        return None

    def _fetched(
        self,
        learner: SimulatedLearner,
        machine: Learner,
        syncer: SimulatedSyncer,
        fragment: int,
        version: int,
        value: float,
    ) -> object:
        if learner.machine is not machine or not learner.alive:
            return False
        if self.apart and (why := self._breaks(learner, syncer)):
            return self._not_fetched(learner, machine, fragment, why)
        learner.fetched[fragment] = value
        return learner.handle_event(fx.Fetched(fragment, version))

    def _not_fetched(self, learner: SimulatedLearner, machine: Learner, fragment: int, why: str) -> object:
        stuck = STUCK_S if why == "it got stuck" else 0.0
        self.queue.call_later(stuck, self.if_same, learner, machine, fx.FetchFailed(fragment, why))
        return None

    def if_same(self, learner: SimulatedLearner, machine: Learner, event: fx.LearnerEvent) -> object:
        return learner.handle_event(event) if learner.machine is machine else False
