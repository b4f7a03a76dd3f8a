"""Bodies of learners of several ranks: each rank sends and fetches its own part, on connections of its own."""

from __future__ import annotations

from collections.abc import Callable

from atoll.courier.rank_channel import UploadPart
from atoll.simulate.cells import Cells, front_of, join_parts, take_part
from atoll.simulate.network import INITIAL_AGAIN_S, STUCK_S, Network
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.simulated_rank import SentPart
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer

STUCK = "it got stuck"


class RankBodies:
    def __init__(self, network: Network) -> None:
        self._network, self._queue, self._world = network, network.queue, network.world

    def _syncer_of(self, learner: RankedLearner) -> SimulatedSyncer | None:
        """A follower dials for itself, so it may reach one while the leader reaches none."""
        return learner.syncer or self._world.syncer_at(learner)

    # ---- up ------------------------------------------------------------------------------------------------------

    def send_part(
        self, learner: RankedLearner, rank: int, order: UploadPart, part: SentPart, told: Callable[[str], object]
    ) -> None:
        """`told` hears why it did not arrive, or nothing."""
        syncer = self._syncer_of(learner)
        delay = self._network.delay() + self._network.body_s
        if syncer is None:
            self._queue.call_later(delay, told, "unreachable")
        else:
            self._queue.call_later(delay, self._take_part, learner, syncer, rank, order, part, told)

    def _take_part(
        self,
        learner: RankedLearner,
        syncer: SimulatedSyncer,
        rank: int,
        order: UploadPart,
        part: SentPart,
        told: Callable[[str], object],
    ) -> object:
        if not learner.alive or rank == learner.gone_rank:
            return False
        key = (learner.name, order.round, order.attempt)
        why = self._network.find_break(learner, syncer)
        if not why and not syncer.receive_part(key, rank, part):
            why = f"no contribution to round {order.round} (attempt {order.attempt}) is waited for"
        if why:
            self._queue.call_later(STUCK_S if why == STUCK else 0.0, told, why)
        else:
            self._queue.call_later(self._network.delay(), self._confirm_part, learner, syncer, told)
        return None

    def _confirm_part(self, learner: RankedLearner, syncer: SimulatedSyncer, told: Callable[[str], object]) -> None:
        """Its receipt is back, or lost."""
        why = self._network.find_break(learner, syncer)
        told(f"no receipt: {why}" if why else "")

    def send_initial_parts(self, learner: RankedLearner) -> None:
        """Version 0: every part again and again until it is there, or the connection is gone."""
        if (connection := learner.connection) is not None:
            parts: dict[int, list[Cells]] = {}
            for rank in range(len(learner.ranks)):
                self._queue.call_later(self._network.delay(), self._take_initial, connection, rank, parts)

    def _take_initial(self, connection: Connection, rank: int, parts: dict[int, list[Cells]]) -> object:
        learner: RankedLearner = connection.learner
        syncer = connection.syncer
        if learner.connection is not connection or not learner.alive or syncer.machine.phase != "empty":
            return False
        if not learner.answers or rank == learner.gone_rank or self._network.find_break(learner, syncer):
            self._queue.call_later(INITIAL_AGAIN_S, self._take_initial, connection, rank, parts)
            return None
        known = syncer.machine.members.learners.get(learner.name)
        if known is None or known.session != learner.session:
            return False
        plan, base = learner.plans[rank], learner.ranks[rank].base
        parts[rank] = [front_of(plan, f, part) for f, part in enumerate(base)]
        if len(parts) < len(learner.ranks):
            return None
        fragments = range(learner.fragments)
        sent = [{rank: rows[f] for rank, rows in parts.items() if rows[f].values.size} for f in fragments]
        whole: list[float] = [join_parts(syncer.rank_plans[learner.name], f, sent[f]) for f in fragments]
        return syncer.take_initial(learner.name, learner.session, whole)

    # ---- down ----------------------------------------------------------------------------------------------------

    def fetch_part(
        self, learner: RankedLearner, rank: int, fragment: int, told: Callable[[int, Cells | str], object]
    ) -> None:
        """`told` hears the version and what this rank holds of it, or why it could not be fetched."""
        syncer = self._syncer_of(learner)
        delay = self._network.delay() + self._network.body_s
        if syncer is None:
            self._queue.call_later(delay, told, -1, "unreachable")
        else:
            self._queue.call_later(delay, self._serve_part, learner, syncer, rank, fragment, told)

    def _serve_part(
        self,
        learner: RankedLearner,
        syncer: SimulatedSyncer,
        rank: int,
        fragment: int,
        told: Callable[[int, Cells | str], object],
    ) -> object:
        if not learner.alive or rank == learner.gone_rank:
            return False
        why = self._network.find_break(learner, syncer)
        if not why and syncer.served[fragment] < 0:
            why = "the run has no parameters yet"
        if why:
            self._queue.call_later(STUCK_S if why == STUCK else 0.0, told, -1, why)
            return None
        whole, version = syncer.theta[fragment], syncer.served[fragment]
        assert isinstance(whole, Cells)
        if not (plans := syncer.rank_plans.get(learner.name, ())):
            self._queue.call_later(0.0, told, -1, f"{learner.name} has no rank {rank}")
            return None
        part = take_part(plans[rank], fragment, whole)
        self._queue.call_later(self._network.delay(), self._bring_part, learner, syncer, version, part, told)
        return None

    def _bring_part(
        self,
        learner: RankedLearner,
        syncer: SimulatedSyncer,
        version: int,
        part: Cells,
        told: Callable[[int, Cells | str], object],
    ) -> None:
        why = self._network.find_break(learner, syncer)
        told(version, why or part)
