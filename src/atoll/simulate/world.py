"""A world of virtual time: the shipped state machines, one number per fragment, and whatever happens to them.

A learner is a training process and its courier (simulated_learner.py, training.py), the syncer a process with effects
in order (simulated_syncer.py). Between them lies the network (network.py), under the syncer a disk
(disk.py). What must hold is checked after every event and at every effect (invariants.py). Everything that is left to
chance comes from one seeded source.

Where learners have several ranks (ranked_learner.py), or the syncer several shards (simulated_shard.py,
simulated_lead.py), a fragment has several values (cells.py): who holds which of them matters. Between learners and
syncer there may be relays (simulated_relay.py, relay_network.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop
from math import inf

from atoll.protocol import records, schedule
from atoll.protocol.effects import Note, Tick
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import ContributionKey
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.effect_order import EffectOrder
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate.cells import CellModel
from atoll.simulate.disk import AGAIN_S, SimulatedDisk
from atoll.simulate.drawn_parts import DrawnLinks, DrawnRelays, DrawnShards
from atoll.simulate.faults import Fault
from atoll.simulate.invariants import Invariants
from atoll.simulate.link_checks import LinkChecks
from atoll.simulate.links import SimulatedLink
from atoll.simulate.network import Network
from atoll.simulate.part_checks import RankInvariants, RelayInvariants, ShardInvariants
from atoll.simulate.rank_network import RankBodies
from atoll.simulate.ranked_learner import RankedLearner, RankLayout
from atoll.simulate.relay_network import RelayedNetwork
from atoll.simulate.shard_network import AGAIN_S as SHARD_AGAIN_S
from atoll.simulate.shard_network import ShardedNetwork
from atoll.simulate.simulated_lead import SimulatedLead
from atoll.simulate.simulated_learner import TENSORS, SimulatedLearner
from atoll.simulate.simulated_rank import SentPart
from atoll.simulate.simulated_relay import SimulatedRelay, SyncerSums
from atoll.simulate.simulated_shard import SimulatedShard
from atoll.simulate.simulated_syncer import Connection, SimulatedSyncer
from atoll.simulate.trace import Trace
from atoll.simulate.training import Payload, Training
from atoll.simulate.virtual_time import EventQueue

Crash = Callable[[syncer_fx.SyncerEffect, str], bool]


class World:
    def __init__(
        self,
        settings: Settings,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        sync_s: float = 0.0,
        every_round: bool = True,
        outer_lr: float = 1.0,
        outer: Mapping[str, str | float | bool] | None = None,
        theta: float = 1.0,
        gradient: Callable[[int], float] = lambda t: 1.0,
        direct: bool = True,
        courier_s: float = 0.0,
        down_s: float = 0.5,
        merge_s: float = 0.0,
        body_s: float = 0.0,
        data: learner_fx.Registered | None = None,
        trace: Trace | None = None,
        ranks: Mapping[str, RankLayout] | None = None,
        model: CellModel | None = None,
        shards: DrawnShards | None = None,
        relays: DrawnRelays | None = None,
        links: DrawnLinks | None = None,
    ) -> None:
        """`ranks`: of learners of several, by name, of this model. `shards`: where the syncer has several. `relays`:
        where some stand between learners and syncer. `links`: where those of learners have a width. `outer`: the outer
        settings in the run's records. Steps are those of plain SGD with `outer_lr`, whatever they are."""
        self.settings = settings
        self.begun = records.BegunRecord("run", settings, dict(outer or {}), (), "plan")
        self.queue, self.random = EventQueue(), random.Random(seed)
        self.trace = trace
        self.events = 0
        """A machine is told something, a training process makes a step, or something else happens."""
        self.outer_lr, self.start_theta, self.gradient = outer_lr, theta, gradient
        self.direct = direct
        """Whether newcomers reach their peers without the syncer."""
        self.courier_s = courier_s
        """How long the word that the run ends takes from a courier to its training process, which trains on."""
        self.down_s, self.merge_s, self.data = down_s, merge_s, data
        self.crash: Crash | None = None
        """Asked "before" and "after" every effect of the syncer: whether its process dies there."""
        self.unmergeable: set[tuple[int, int]] = set()
        """(round, attempt) whose merge comes to nothing."""
        self.overflow = False
        """And their outer state with it."""
        self.finished = False
        self.learners: dict[str, SimulatedLearner] = {}
        """By name, the newest process of that name."""
        self.processes: list[SimulatedLearner] = []
        """All that live."""
        self._sessions = 0
        self.disk = SimulatedDisk(self.begun, self.random, sync_s=sync_s, every_round=every_round)
        self.disk.claim = 1
        self._drawn_shards, self._drawn_relays = shards, relays
        self.network = self._make_network(latency_s, jitter)
        self.network.body_s = body_s
        self.body_bytes = (0.0, 0.0)
        """Bytes of a contribution and of a version, as the syncer knows them; 0: it does not."""
        self.rank_network, self._ranks, self._model = RankBodies(self.network), ranks or {}, model
        self.simulated_syncer = SimulatedSyncer(self, History(self.begun), [theta] * settings.fragments)
        """The syncer of the newest term."""
        self.simulated_syncers = [self.simulated_syncer]
        """Every syncer's process that lives."""
        self._give_parts(self.simulated_syncer)
        numbers = range(2, shards.shards + 1) if shards is not None else ()
        self.shards = [
            SimulatedShard(self, n, len(numbers) + 1, [self.find_slice(n, f) for f in range(settings.fragments)])
            for n in numbers
        ]
        self.invariants = self.make_invariants()
        self.rank_checks = RankInvariants(self.invariants.oracle)
        holders = shards.holders if shards is not None else ()
        self.shard_checks = ShardInvariants(self.invariants.oracle, self.shards, holders, self._read_initial)
        self.relay_checks = RelayInvariants(self.disk, settings.learners, settings.fragments)
        self.relays = [SimulatedRelay(self, n, relays.sum_s) for n in range(relays.relays)] if relays else []
        if links is not None:
            self._lay_links(links)

    def _make_network(self, latency_s: float, jitter: float) -> Network:
        if self._drawn_shards is not None:
            return ShardedNetwork(self, latency_s, jitter)
        kind = Network if self._drawn_relays is None else RelayedNetwork
        return kind(self, latency_s, jitter)

    def _lay_links(self, drawn: DrawnLinks) -> None:
        self.set_body_bytes(drawn.up_bytes, drawn.down_bytes)
        self.network.link_s = drawn.slowest_s
        for number, rates in enumerate(drawn.rates):
            self.network.links[f"learner-{number}"] = SimulatedLink(*rates, drawn.up_bytes, drawn.down_bytes)
        for at, number, up_rate, down_rate in drawn.changes:
            link = self.network.links[f"learner-{number}"]
            self.queue.call_later(at, link.set_rates, up_rate, down_rate)

    def set_body_bytes(self, up_bytes: float, down_bytes: float) -> None:
        """Let the syncer of this term and those of later ones know the size of bodies."""
        self.body_bytes = up_bytes, down_bytes
        self._tell_body_bytes(self.simulated_syncer)

    def _tell_body_bytes(self, syncer: SimulatedSyncer) -> None:
        interval = syncer.machine.rounds.interval
        interval.up_bytes, interval.down_bytes = self.body_bytes

    def link_seconds(self, name: str) -> tuple[float, float]:
        """Return the seconds of a contribution and of a version on the links of a learner and its relay."""
        relay = self.relay_of(self.learners[name])
        above = relay.body_link if relay is not None else None
        links = [link for link in (self.network.links.get(name), above) if link is not None]
        return (
            sum(link.up_bytes / link.up_rate for link in links),
            sum(link.down_bytes / link.down_rate for link in links),
        )

    @property
    def crossings(self) -> int:
        """`schedule.CROSSINGS`, and those to a relay or to shards, and back."""
        parts = self._drawn_relays is not None or self._drawn_shards is not None
        return schedule.CROSSINGS + (4 if parts else 0)

    def make_invariants(self) -> Invariants:
        work_s = self.merge_s + 4 * self.disk.sync_s
        if self._drawn_shards is not None:
            work_s += SHARD_AGAIN_S  # a shard that does not know of the round yet is asked again
        return Invariants(
            self.settings,
            self.disk,
            self.simulated_syncer,
            self.learners,
            outer_lr=self.outer_lr,
            gradient=self.gradient,
            trip_s=self.network.longest_s,
            link_checks=LinkChecks(
                self.learners,
                self.link_seconds,
                one_way_s=self.network.longest_s,
                work_s=work_s,
                crossings=self.crossings,
            ),
        )

    @property
    def now(self) -> float:
        return self.queue.now

    @property
    def syncer(self) -> Syncer:
        return self.simulated_syncer.machine

    @property
    def longest_h(self) -> int:
        """Of all phases, and as the run began."""
        return max(one.sync_every for one in (self.settings, *self.syncer.settings.in_all_phases))

    # ---- time ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let the next thing happen. One that no machine is told of counts as an event of its own."""
        before = self.events
        if self.queue.step() and self.events == before:
            self.events += 1

    def run(self, until: float, most_events: float = inf) -> None:
        """To this moment, the end, or so many events."""
        queue, heap = self.queue, self.queue.heap
        while heap and heap[0][0] <= until and not self.finished and self.events < most_events:
            before = self.events
            queue.now, _, action, arguments = heappop(heap)
            if action(*arguments) is not False and self.events == before:
                self.events += 1

    # ---- machines -----------------------------------------------------------------------------------------------

    def deliver(
        self, syncer: SimulatedSyncer, event: syncer_fx.SyncerEvent, least: float = 0.0
    ) -> list[syncer_fx.SyncerEffect]:
        return syncer.handle_event(event, least)

    def on_syncer_event(
        self,
        syncer: SimulatedSyncer,
        now: float,
        event: syncer_fx.SyncerEvent,
        effects: Sequence[syncer_fx.SyncerEffect],
    ) -> None:
        self.events += 1
        if self.trace is not None:
            self.trace.add(now, Syncer, syncer.name, event, effects)
        self.invariants.watch_syncer(syncer, now, event)

    def on_learner_event(
        self, learner: SimulatedLearner, event: learner_fx.LearnerEvent, effects: Sequence[learner_fx.LearnerEffect]
    ) -> None:
        self.events += 1
        if self.trace is not None:
            self.trace.add(self.queue.now, LearnerMachine, learner.session, event, effects)
        self.invariants.watch_learner(learner, event, effects)

    def on_handled(self, machine: type, node: str, event: object, effects: Sequence[object]) -> None:
        """Take note of what another machine was told, and what it answered."""
        if self.trace is not None:
            self.trace.add(self.queue.now, machine, node, event, effects)

    def carry_out_syncer_effect(self, syncer: SimulatedSyncer, effect: syncer_fx.SyncerEffect) -> None:
        if self.crash is not None and self.crash(effect, "before"):
            self.crash_syncer()
            return
        self.on_handled(EffectOrder, syncer.name, None, (effect,))
        self.invariants.watch_effect(syncer, effect)
        syncer.carry_out(effect)
        if self.crash is not None and syncer.alive and self.crash(effect, "after"):
            self.crash_syncer()

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None:
        learner.carry_out(effect)

    # ---- learners -----------------------------------------------------------------------------------------------

    def join(self, name: str, step_s: float = 1.0, *, restored: bool = False) -> SimulatedLearner:
        """A new training process under this name, not connected yet; the one before it is gone."""
        if (old := self.learners.get(name)) is not None and old.alive:
            self.end_process(old)
        return self.start_process(name, step_s, restored=restored)

    def start_process(self, name: str, step_s: float, *, restored: bool = False) -> SimulatedLearner:
        self._sessions += 1
        session = f"{name}/{self._sessions}"
        learner = self._make_learner(name, session, step_s, restored)
        if name in self.learners:  # an unseeded script: a restarted process begins with other weights
            learner.set_first_weights(self.start_theta + self._sessions)
        self.learners[name] = learner
        self.processes.append(learner)
        return learner

    def _make_learner(self, name: str, session: str, step_s: float, restored: bool) -> SimulatedLearner:
        model, layout = self._model, self._ranks.get(name)
        if model is not None and layout is not None:
            return RankedLearner(
                self, name, session, step_s, self.gradient, model, layout, restored=restored, data=self.data
            )
        tensors = TENSORS if model is None else model.tensors
        return SimulatedLearner(
            self, name, session, step_s, self.gradient, restored=restored, data=self.data, tensors=tensors
        )

    def end_process(self, learner: SimulatedLearner) -> None:
        """Without a word: who is connected to it has to notice."""
        learner.alive = False
        learner.connection = None
        self.processes = [one for one in self.processes if one is not learner]

    def kill(self, learner: SimulatedLearner, reason: str = "killed") -> None:
        """Its host closes its connections."""
        if (connection := learner.connection) is not None:
            self.network.closed_by(connection, reason)
        self.end_process(learner)

    def connections(self, learner: SimulatedLearner) -> list[Connection]:
        """Those of which one end still stands."""
        found = [learner.connection] if learner.connection is not None else []
        for syncer in self.simulated_syncers:
            connection = syncer.channels.get(learner.name)
            if connection is not None and connection.learner is learner and connection not in found:
                found.append(connection)
        return found

    def syncer_at(self, learner: SimulatedLearner) -> SimulatedSyncer | None:
        """Whom a dial reaches: of several syncers any."""
        alive = [syncer for syncer in self.simulated_syncers if syncer.alive]
        return alive[0] if len(alive) == 1 else self.random.choice(alive) if alive else None

    # ---- the syncer ---------------------------------------------------------------------------------------------

    def crash_syncer(self, down_s: float | None = None, *, power: bool = False) -> None:
        """Its process dies (`power`: with its machine); a new one reads what is durable, in a new term."""
        for syncer in self.simulated_syncers if power else [self.simulated_syncer]:
            syncer.end("the syncer died")
        self.simulated_syncers = [syncer for syncer in self.simulated_syncers if syncer.alive]
        if power:
            self.invariants.watch_power_cut()
            self.disk.power_cut()
        self.queue.call_later(self.down_s if down_s is None else down_s, self.start_syncer, self.disk.claim)

    def syncer_failed(self, syncer: SimulatedSyncer, reason: str) -> None:
        """It ended by itself; whoever watches it starts another."""
        syncer.end(reason)
        self.simulated_syncers = [one for one in self.simulated_syncers if one.alive]
        self.queue.call_later(self.down_s, self.start_syncer, syncer.term)

    def start_syncer(self, after: int) -> object:
        """The successor of that term, unless it has one."""
        if self.disk.claim != after or self.finished:
            return False
        if self.disk.full or self.disk.broken:
            self.queue.call_later(self.down_s, self.start_syncer, after)
            return None
        history, theta = self.disk.recover(self.outer_lr)
        self.disk.claim_term(history)
        before, self.simulated_syncer = (
            self.simulated_syncer,
            SimulatedSyncer(self, history, theta or list(before_start(self))),
        )
        self.simulated_syncers = [syncer for syncer in (*self.simulated_syncers, self.simulated_syncer) if syncer.alive]
        self.simulated_syncer.clock.ahead_s = before.clock.ahead_s
        self._give_parts(self.simulated_syncer)
        self.invariants.restarted(self.simulated_syncer)
        self.begin_term(self.simulated_syncer)
        return None

    def _give_parts(self, syncer: SimulatedSyncer) -> None:
        self._tell_body_bytes(syncer)
        if self._drawn_relays is not None:
            syncer.sums = SyncerSums(syncer)
        if (drawn := self._drawn_shards) is not None:
            decisions = self.disk.read_decisions()
            holders = list(drawn.holders)
            syncer.lead = SimulatedLead(syncer, drawn.shards, self.begun, holders, decisions, self.merge_s)

    def _read_initial(self) -> list[list[float]]:
        return [syncer.initial for syncer in self.simulated_syncers]

    def find_holders(self, fragment: int) -> tuple[int, ...]:
        assert self._drawn_shards is not None
        return self._drawn_shards.holders[fragment]

    def find_slice(self, shard: int, fragment: int) -> slice:
        assert self._drawn_shards is not None
        return self._drawn_shards.find_slice(shard, fragment)

    def lead_at(self, shard: SimulatedShard) -> SimulatedLead | None:
        """Whom the dial of a shard reaches: of several leads any."""
        leads = [one.lead for one in self.simulated_syncers if one.alive and not one.paused and one.lead is not None]
        return self.random.choice(leads) if leads else None

    def relay_of(self, learner: SimulatedLearner) -> SimulatedRelay | None:
        """Through which it comes while it can."""
        number = -1 if self._drawn_relays is None else self._drawn_relays.find_relay(learner.name)
        return self.relays[number] if number >= 0 else None

    def syncer_for_relay(self) -> SimulatedSyncer | None:
        """Whom the dial of a relay reaches: of several syncers any."""
        alive = [one for one in self.simulated_syncers if one.alive and not one.paused]
        return self.random.choice(alive) if alive else None

    def relay_delay(self) -> float:
        return self.network.delay()

    def on_relay_lost(self, relay: SimulatedRelay, connections: Sequence[Connection], reason: str) -> None:
        assert isinstance(self.network, RelayedNetwork)
        self.network.lose_relay(connections, reason)

    def on_sums_merged(
        self, syncer: SimulatedSyncer, merge: syncer_fx.Merge, counted: Sequence[tuple[ContributionKey, float]]
    ) -> None:
        assert syncer.sums is not None
        self.relay_checks.watch_sums(syncer.sums, merge, counted)

    def shard_delay(self) -> float:
        return self.network.delay()

    def draw_sync_s(self) -> float:
        return self.disk.sync_s * (0.5 + self.random.random())

    def on_decision(self, record: records.MergedRecord) -> None:
        self.shard_checks.watch_decision(record)

    def begin_term(self, syncer: SimulatedSyncer) -> None:
        self.deliver(syncer, Tick())
        syncer.check_lease()

    def close_later(self, syncer: SimulatedSyncer) -> None:
        """Close the run once learners had time to fetch its last versions, behind one that was on its way already."""
        bodies_s = (self.settings.fragments + 1) * self.network.link_s
        fetch_s = 20 * (self.network.latency_s + self.network.body_s) + bodies_s
        self.queue.call_later(fetch_s + 2.0, self.close_run, syncer)

    def close_run(self, syncer: SimulatedSyncer) -> object:
        if not syncer.alive:
            return False
        if syncer.paused:
            self.queue.call_later(1.0, self.close_run, syncer)
            return False
        self.deliver(syncer, syncer_fx.Over())
        return self._finish_when_written(syncer)

    def _finish_when_written(self, syncer: SimulatedSyncer) -> object:
        """As the service does: it is over once its last records are durable. One that finds then that another term was
        claimed, or whose disk fails, ends without them, and its successor brings the run to its end."""
        if not syncer.alive:
            return False
        if syncer.has_unwritten:
            self.queue.call_later(AGAIN_S, self._finish_when_written, syncer)
            return False
        self.finished = True
        return None

    # ---- what others decide or look at ----------------------------------------------------------------------------

    def cut_s(self) -> float:
        return self.network.delay()

    def answer_merge(self, merge: syncer_fx.Merge) -> syncer_fx.SyncerEvent:
        if (merge.round, merge.parts[0].attempt) in self.unmergeable:
            return syncer_fx.Unmergeable(merge.round, "the merged norm is absurd", reset=self.overflow)
        return syncer_fx.Merged(merge.round, "digest")

    def on_adoption(self, learner: Training, adopt: learner_fx.Adopt, value: float, dropped: int) -> None:
        """It is about to be adopted, after which so many tokens of the fragment are dropped in all."""
        self.invariants.watch_adoption(learner, adopt, value, dropped)

    def on_own(self, learner: Training) -> None:
        self.invariants.watch_own(learner)

    def on_payload_received(self, syncer: SimulatedSyncer, key: ContributionKey, payload: Payload) -> None:
        self.invariants.oracle.payloads[syncer.term, *key] = payload

    def on_parts_merged(self, learner: str, fragment: int, parts: Mapping[int, SentPart]) -> None:
        self.rank_checks.watch_parts(learner, fragment, parts)

    def draw_delay(self, most_s: float) -> float:
        return most_s * self.random.random()

    def on_supply(self, learner: SimulatedLearner, supply: learner_fx.Supply) -> None:
        self.invariants.learner_checks.check_supply(learner, supply)

    def on_save(self, learner: SimulatedLearner, cut: int, life: int) -> None:
        """A training process saves its part of a cut, of this life."""
        self.invariants.watch_save(learner, cut, life)

    def on_final_stop(self, learner: RankedLearner, rank: int, adopted: Sequence[int]) -> None:
        self.invariants.learner_checks.watch_final_stop(learner, rank, adopted)

    def on_contribution_sent(self, learner: SimulatedLearner, copy: learner_fx.Copied) -> None:
        self.invariants.watch_contribution(learner, copy)

    def on_leave_asked(self, learner: SimulatedLearner) -> None:
        self.invariants.drains.watch_leave_asked(learner)

    def on_left(self, learner: SimulatedLearner) -> None:
        self.invariants.drains.watch_left(learner)

    def on_block(self, learner: Training) -> None:
        self.invariants.watch_block(learner)

    def step_s(self, learner: Training) -> float:
        """How long the step takes that begins now."""
        return learner.step_s

    def on_step(self, learner: Training) -> None:
        pass

    def on_fault(self, fault: Fault) -> None:
        pass

    def on_note(self, note: Note) -> None:
        """For those that keep a story."""

    def on_inform(self, learner: SimulatedLearner, progress: float) -> None:
        """A learner heard how far the run is."""

    def on_cut_complete(self, cut: syncer_fx.CompleteCut) -> None:
        pass


def before_start(world: World) -> list[float]:
    return [world.start_theta] * world.settings.fragments
