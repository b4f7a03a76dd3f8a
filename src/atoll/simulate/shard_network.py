"""Bodies of learners where the syncer has several shards: each gets and has its part of a fragment (courier/shards.py).

A shard that is away is asked again for as long as the lead can be reached. A version is fetched once all parts are of
the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

import numpy as np

from atoll.digests import combine_digests, compute_digest
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.shard_effects import LEAD
from atoll.simulate.cells import SIZE, Cells
from atoll.simulate.network import INITIAL_AGAIN_S, STUCK_S, Network, NetworkWorld
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_shard import SimulatedShard
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer
from atoll.simulate.training import Payload

AGAIN_S = 0.4
TRIES = 25
"""A shard that waits for no such body is asked so often."""


class ShardedWorld(NetworkWorld, Protocol):
    shards: list[SimulatedShard]

    def find_holders(self, fragment: int) -> tuple[int, ...]: ...

    def find_slice(self, shard: int, fragment: int) -> slice: ...


@dataclass(slots=True)
class PartUpload:
    learner: SimulatedLearner
    machine: LearnerMachine
    connection: Connection
    round: int
    attempt: int
    payload: Payload
    parts: dict[int, Cells]
    digests: dict[int, str]
    seconds: float = 0.0
    """Seconds that its bytes take on a link of a given width."""
    here: set[int] = field(default_factory=set)
    over: bool = False


@dataclass(slots=True)
class PartFetch:
    learner: SimulatedLearner
    machine: LearnerMachine
    connection: Connection
    fragment: int
    holders: tuple[int, ...]
    asked_at: float
    seconds: float = 0.0
    """Seconds that its bytes took on a link of a given width."""
    found: dict[int, tuple[int, Cells]] = field(default_factory=dict)
    over: bool = False


class ShardedNetwork(Network):
    world: ShardedWorld

    def _shard(self, number: int) -> SimulatedShard:
        return self.world.shards[number - LEAD - 1]

    def _is_over(self, job: PartUpload | PartFetch) -> bool:
        return job.over or not job.learner.alive or job.learner.machine is not job.machine

    # ---- up ------------------------------------------------------------------------------------------------------

    def upload(self, learner: SimulatedLearner, number: int, attempt: int, payload: Payload) -> None:
        if (connection := learner.connection) is None:
            return
        delta = payload.delta if isinstance(payload.delta, Cells) else Cells(np.full(SIZE, np.nan))
        holders = self.world.find_holders(payload.copy.fragment)
        parts = {n: Cells(delta.values[self.world.find_slice(n, payload.copy.fragment)]) for n in holders}
        digests = {n: compute_digest(part.values.tobytes()) for n, part in parts.items()}
        job = PartUpload(learner, learner.machine, connection, number, attempt, payload, parts, digests)
        link = self.links.get(learner.name)
        for n in holders:
            through_at, seconds = link.pass_up(self.queue.now, 1 / len(holders)) if link else (self.queue.now, 0.0)
            job.seconds += seconds
            self.queue.call_at(through_at + self.delay() + self.body_s, self._put_part, job, n, 0)

    def _put_part(self, job: PartUpload, n: int, tries: int) -> object:
        if self._is_over(job):
            return False
        syncer, key = job.connection.syncer, (job.learner.name, job.round, job.attempt)
        if why := self.find_break(job.learner, syncer):
            return self._fail_upload(job, why)
        if n == LEAD:
            if not syncer.receive(key, job.payload):
                return self._fail_upload(job, f"no contribution to round {job.round} is waited for")
            assert syncer.lead is not None
            syncer.lead.take_own_body(key, job.digests[n], broken=isnan(job.payload.delta))
        else:
            shard = self._shard(n)
            serves = shard.alive and shard.machine.serves
            why = shard.receive_body(key, job.learner.session, job.parts[n], job.digests[n]) if serves else "away"
            if why:
                if tries >= TRIES or job.learner.connection is not job.connection or why.endswith("already"):
                    return self._fail_upload(job, why)
                self.queue.call_later(AGAIN_S, self._put_part, job, n, tries + serves)
                return None
        self.queue.call_later(self.delay(), self._part_is_there, job, n)
        return None

    def _fail_upload(self, job: PartUpload, why: str) -> object:
        job.over = True
        failed = learner_fx.UploadFailed(job.round, job.attempt, why)
        self.queue.call_later(STUCK_S if why == "it got stuck" else 0.0, self.if_same, job.learner, job.machine, failed)
        return None

    def _part_is_there(self, job: PartUpload, n: int) -> object:
        if self._is_over(job):
            return False
        job.here.add(n)
        if job.here != set(job.parts):
            return None
        digest = combine_digests([job.digests[one] for one in sorted(job.parts)])
        nbytes = round(self.links[job.learner.name].up_bytes) if job.seconds else 0
        uploaded = learner_fx.Uploaded(job.round, job.attempt, digest, nbytes=nbytes, seconds=job.seconds)
        return self.if_same(job.learner, job.machine, uploaded)

    def _come_up(self, connection: Connection, event: syncer_fx.SyncerEvent) -> object:
        """A contribution is told of once all its parts are there."""
        syncer, learner = connection.syncer, connection.learner
        is_there = syncer.alive and syncer.channels.get(learner.name) is connection and not learner.blocked_up
        if not isinstance(event, syncer_fx.Delivered) or not is_there:
            return super()._come_up(connection, event)
        assert syncer.lead is not None
        syncer.hear_contribution(event.learner, event.contribution)
        return None

    def upload_all(self, learner: SimulatedLearner) -> None:
        super().upload_all(learner)
        if (connection := learner.connection) is not None:
            for shard in self.world.shards:
                self.queue.call_later(self.delay(), self._put_initial, connection, shard)

    def _put_initial(self, connection: Connection, shard: SimulatedShard) -> object:
        learner: SimulatedLearner = connection.learner
        if learner.connection is not connection or not learner.alive or connection.syncer.machine.phase != "empty":
            return False
        whole = [one for one in learner.base if isinstance(one, Cells)]
        broken = not learner.answers or self.find_break(learner, connection.syncer) or not shard.alive
        if broken or not shard.receive_initial(learner.name, learner.session, whole):
            self.queue.call_later(INITIAL_AGAIN_S, self._put_initial, connection, shard)
        return None

    # ---- down ----------------------------------------------------------------------------------------------------

    def fetch(self, learner: SimulatedLearner, fragment: int) -> None:
        if (connection := learner.connection) is None:
            super().fetch(learner, fragment)
            return
        holders = self.world.find_holders(fragment)
        job = PartFetch(learner, learner.machine, connection, fragment, holders, self.queue.now)
        for n in holders:
            self.queue.call_later(self.delay() + self.body_s, self._get_part, job, n, -1)

    def _get_part(self, job: PartFetch, n: int, least: int) -> object:
        """`least`: the version that other shards have."""
        if self._is_over(job):
            return False
        syncer = job.connection.syncer
        if why := self.find_break(job.learner, syncer):
            return self._fail_fetch(job, why)
        version, part = self._find_part(syncer, n, job.fragment)
        if part is None or version < max(least, 0):
            if job.learner.connection is not job.connection or (n == LEAD and version < 0):
                return self._fail_fetch(job, "the syncer is out of reach")
            self.queue.call_later(AGAIN_S, self._get_part, job, n, least)
            return None
        link = self.links.get(job.learner.name)
        through_at, seconds = link.pass_down(self.queue.now, 1 / len(job.holders)) if link else (self.queue.now, 0.0)
        job.seconds += seconds
        arrives_at = through_at + self.delay()
        if link is not None and len(job.found) + 1 == len(job.holders):
            self.arrive_nearly(job.learner, link, arrives_at)
        self.queue.call_at(arrives_at, self._take_part, job, n, version, part)
        return None

    def _find_part(self, syncer: SimulatedSyncer, n: int, fragment: int) -> tuple[int, Cells | None]:
        if n == LEAD:
            whole = syncer.theta[fragment]
            assert isinstance(whole, Cells)
            return syncer.served[fragment], Cells(whole.values[self.world.find_slice(LEAD, fragment)])
        shard = self._shard(n)
        if not shard.alive or not shard.machine.serves or not shard.theta:
            return -1, None
        return shard.versions[fragment], shard.theta[fragment]

    def _fail_fetch(self, job: PartFetch, why: str) -> object:
        job.over = True
        return self._not_fetched(job.learner, job.machine, job.fragment, why)

    def _take_part(self, job: PartFetch, n: int, version: int, part: Cells) -> object:
        if self._is_over(job):
            return False
        if why := self.find_break(job.learner, job.connection.syncer):
            return self._fail_fetch(job, why)
        job.found[n] = version, part
        if len(job.found) < len(job.holders):
            return None
        newest = max(version for version, _ in job.found.values())
        if behind := [one for one, (version, _) in job.found.items() if version < newest]:
            for one in behind:
                del job.found[one]
                self.queue.call_later(self.delay(), self._get_part, job, one, newest)
            return None
        job.over = True
        whole = np.concatenate([job.found[one][1].values for one in job.holders])
        job.learner.fetched[job.fragment] = Cells(whole)
        nbytes = round(self.links[job.learner.name].down_bytes) if job.seconds else 0
        latency_s = self.queue.now - job.asked_at - job.seconds if job.seconds else 0.0
        return job.learner.handle_event(learner_fx.Fetched(job.fragment, newest, nbytes, job.seconds, latency_s))
