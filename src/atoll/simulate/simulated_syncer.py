"""A syncer's process: its machine, its channels, and its effects in the order of protocol/syncer/effect_order.py, as in
the service. A process that finds that another term was claimed ends without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Protocol

import msgspec

from atoll.digests import combine_digests
from atoll.numerics.rank_plan import RankPlan, make_rank_plans
from atoll.protocol import records, schedule
from atoll.protocol.effects import Note, Tick
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.messages import Contribution, ContributionKey, FromSyncer, Hello, Pull
from atoll.protocol.relay import HeldBody
from atoll.protocol.shard_messages import FromShard, InitialHere
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.effect_order import EffectOrder, entries_of
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate.cells import join_parts
from atoll.simulate.disk import AGAIN_S, DiskEntry, SimulatedDisk
from atoll.simulate.simulated_lead import SimulatedLead
from atoll.simulate.simulated_rank import SentPart
from atoll.simulate.simulated_relay import SyncerSums
from atoll.simulate.training import Payload
from atoll.simulate.virtual_time import EventQueue, HostClock
from atoll.syncer.ranks import check_ranks

LEASE_CHECK_S = 1.0
"""How often it checks that no other syncer has claimed a newer term."""


class Connection:
    """A control channel, as both ends hold it."""

    __slots__ = ("arrives", "held_down", "held_up", "learner", "relay", "syncer")

    def __init__(self, learner: Any, syncer: SimulatedSyncer, relay: Any = None) -> None:
        """`learner`: a SimulatedLearner, which this file does not know. `relay`: which it comes through."""
        self.learner, self.syncer, self.relay = learner, syncer, relay
        self.arrives: dict[str, float] = {}
        """Per way, when the last that was sent on it arrives."""
        self.held_up: deque[syncer_fx.SyncerEvent] = deque()
        self.held_down: deque[learner_fx.LearnerEvent] = deque()

    def at(self, way: str, at: float) -> float:
        """In order: not before what was sent before it."""
        at = max(at, self.arrives.get(way, 0.0))
        self.arrives[way] = at
        return at


class SyncerNetwork(Protocol):
    def send_down(self, syncer: SimulatedSyncer, name: str, message: FromSyncer) -> None: ...

    def expel_learner(self, syncer: SimulatedSyncer, name: str, reason: str) -> None: ...

    def close_all(self, syncer: SimulatedSyncer, reason: str) -> None: ...


class SyncerWorld(Protocol):
    """What a syncer needs of the world around it."""

    queue: EventQueue
    disk: SimulatedDisk
    outer_lr: float
    merge_s: float

    @property
    def network(self) -> SyncerNetwork: ...

    def deliver(
        self, syncer: SimulatedSyncer, event: syncer_fx.SyncerEvent, least: float = 0.0
    ) -> list[syncer_fx.SyncerEffect]: ...

    def on_syncer_event(
        self, syncer: SimulatedSyncer, now: float, event: syncer_fx.SyncerEvent, effects: list[syncer_fx.SyncerEffect]
    ) -> None: ...

    def on_handled(self, machine: type, node: str, event: object, effects: Sequence[object]) -> None: ...

    def carry_out_syncer_effect(self, syncer: SimulatedSyncer, effect: syncer_fx.SyncerEffect) -> None: ...

    def on_payload_received(self, syncer: SimulatedSyncer, key: ContributionKey, payload: Payload) -> None: ...

    def on_parts_merged(self, learner: str, fragment: int, parts: Mapping[int, SentPart]) -> None: ...

    def on_decision(self, record: records.MergedRecord) -> None: ...

    def on_sums_merged(
        self, syncer: SimulatedSyncer, merge: syncer_fx.Merge, counted: Sequence[tuple[ContributionKey, float]]
    ) -> None: ...

    def syncer_failed(self, syncer: SimulatedSyncer, reason: str) -> None: ...

    def close_later(self, syncer: SimulatedSyncer) -> None: ...

    def cut_s(self) -> float: ...

    def answer_merge(self, merge: syncer_fx.Merge) -> syncer_fx.SyncerEvent: ...

    def on_note(self, note: Note) -> None: ...

    def on_cut_complete(self, cut: syncer_fx.CompleteCut) -> None: ...


class SimulatedSyncer:
    def __init__(self, world: SyncerWorld, history: History, theta: list[float]) -> None:
        self.world, self.machine = world, Syncer(history)
        self.name, self.term = f"syncer-{history.term}", history.term
        self.clock = HostClock()
        self.now = 0.0
        """What its clock showed at the last event."""
        self.alive, self.paused = True, False
        self._paused_at = 0.0
        """By its own clock."""
        self.channels: dict[str, Connection] = {}
        self.theta = theta
        """The committed values; before the run has any, those it will begin with."""
        self.served = list(history.versions)
        """The versions that a fetch gets."""
        self.initial: list[float] = []
        self.staged: dict[int, tuple[float, float]] = {}
        """Per fragment, the merged outer gradient and the new value."""
        self.restored: list[float] = []
        """What the run is about to be rolled back to."""
        self.payloads: dict[ContributionKey, float] = {}
        self.parts: dict[ContributionKey, dict[int, SentPart]] = {}
        """By rank, of contributions that come as parts."""
        self.lead: SimulatedLead | None = None
        """Of a syncer of several shards."""
        self.sums: SyncerSums | None = None
        """Where there are relays."""
        self._initial_of: tuple[str, str] = ("", "")
        """Who sent them: learner and session."""
        self.rank_plans: dict[str, tuple[RankPlan, ...]] = {}
        """By learner, of those of several ranks that are connected."""
        self.digests: dict[ContributionKey, str] = {}
        """Of contributions that came as parts, or that a relay holds."""
        self.held: set[ContributionKey] = set()
        """Those that a relay holds."""
        self._asked: set[ContributionKey] = set()
        self._probes: dict[str, ContributionKey] = {}
        self._order = EffectOrder()
        self._writing = False
        self._backlog: list[syncer_fx.SyncerEvent] = []
        self._alarm = inf
        """The earliest wake-up that is set."""

    @property
    def has_unwritten(self) -> bool:
        """Something that was decided is not durable, or not carried out yet."""
        return self._order.has_waiting

    # ---- events -------------------------------------------------------------------------------------------------

    def handle_event(self, event: syncer_fx.SyncerEvent, least: float = 0.0) -> list[syncer_fx.SyncerEffect]:
        if not self.alive:
            return []
        if self.paused:
            self._backlog.append(event)
            return []
        world, machine = self.world, self.machine
        self.now = now = self.clock.read(world.queue.now, least)
        if self.lead is not None and (away_s := self.lead.state.take_standstill_s(now)) > 0:
            stood = syncer_fx.StoodStill(away_s)
            told = machine.handle(now, stood)
            world.on_syncer_event(self, now, stood, told)
            self._order.enqueue(told)
        effects = machine.handle(now, event)
        world.on_syncer_event(self, now, event, effects)
        self._order.enqueue(effects)
        self.carry_out_waiting()
        if (wake := machine.wake_at) is not None and wake < self._alarm:
            self._alarm = wake
            world.queue.call_later(self.clock.when(wake) - world.queue.now, self._wake, wake)
        return effects

    def _wake(self, alarm: float) -> object:
        """The earliest alarm goes off; the machine may want to be woken later by now."""
        if alarm != self._alarm:
            return False
        self._alarm, wake = inf, self.machine.wake_at
        if wake is None or not self.alive:
            return False
        if wake > alarm:
            self._alarm = wake
            self.world.queue.call_later(self.clock.when(wake) - self.world.queue.now, self._wake, wake)
            return False
        return self.world.deliver(self, Tick(), wake)

    def greet(self, name: str, connection: Connection, hello: Hello) -> None:
        """An older channel of the same learner is replaced: it is closed, and nothing more is heard of it."""
        if self.alive:
            if self.channels.get(name) is not connection:
                self.world.network.expel_learner(self, name, "another connection took its place")
            self.channels[name] = connection
            if hello.ranks:
                check_ranks(hello, self.machine.settings)
                self.rank_plans[name] = make_rank_plans(connection.learner.model.plan, hello.ranks)
            self.world.deliver(self, syncer_fx.Greeted(hello))

    def check_lease(self) -> object:
        """A syncer that was replaced ends, also when it has nothing to write."""
        if not self.alive or self.paused:
            return False
        if self.world.disk.claim != self.term:
            self.end("another syncer has taken over")
        else:
            self.world.queue.call_later(LEASE_CHECK_S, self.check_lease)
        return False

    def jump(self, seconds: float) -> None:
        """Its clock goes forward; it takes that for a time in which it stood still, and looks at what is due now."""
        self.clock.jump(seconds)
        self._alarm = inf
        self.world.deliver(self, syncer_fx.StoodStill(seconds))

    def stop(self) -> None:
        """It stands still until it is woken up."""
        self.paused, self._paused_at = True, self.clock.read(self.world.queue.now)

    def wake_up(self) -> None:
        """It runs again, after a while in which it stood still."""
        self.paused = False
        if self.world.disk.claim != self.term and self._writing:
            self.end("another syncer has taken over")
        stood_s = self.clock.read(self.world.queue.now) - self._paused_at
        self.world.deliver(self, syncer_fx.StoodStill(stood_s))
        events, self._backlog = self._backlog, []
        for event in events:
            self.world.deliver(self, event)
        if self.lead is not None:
            self.lead.hear_unheard()
        if self.sums is not None:
            self.sums.hear_unheard()
        self.world.deliver(self, Tick())
        self.carry_out_waiting()
        self.check_lease()

    def end(self, reason: str) -> None:
        """The process is gone, with all it had in memory."""
        if self.alive:
            self.die()
            self.world.disk.abandon_append(self.term)
            self.world.network.close_all(self, reason)

    def die(self) -> None:
        self.alive = False
        if self.lead is not None:
            self.lead.close()
        if self.sums is not None:
            self.sums.close()
        self._order.close()

    # ---- effects in order ---------------------------------------------------------------------------------------

    def carry_out_waiting(self) -> None:
        """Carry out what may be, and write what must be durable first: at once, where the disk takes no time."""
        while not self.paused:
            self._order.carry_out_ready(lambda effect: self.world.carry_out_syncer_effect(self, effect))
            if (write := self._order.begin_write()) is None or not self._write(write):
                return

    def _write(self, write: list[syncer_fx.Persist] | syncer_fx.TakeCut) -> bool:
        """Start to write; True when that is done already."""
        self.on_handled(EffectOrder, "write", write if isinstance(write, list) else (write,))
        if isinstance(write, syncer_fx.TakeCut) and self.lead is not None:
            self._writing = True
            self.lead.take_cut(write, list(self.initial), len(self.world.disk.journal), self.world.cut_s())
            return False
        if isinstance(write, syncer_fx.TakeCut):
            self.world.carry_out_syncer_effect(self, write)
            return self._end_or_go_on(fenced=self.world.disk.claim != self.term)
        entries: list[DiskEntry] = entries_of(write, self._payload)
        takes_s = self.world.disk.begin_append(self.term, entries)
        if takes_s == 0.0 and not self.world.disk.full and not self.world.disk.broken:
            return self._written()
        self._writing = True
        self.world.queue.call_later(takes_s, self._end_write)
        return False

    def _payload(self, persist: syncer_fx.Persist) -> float | list[float] | None:
        if persist.restored:
            return self.restored
        if persist.round < 0:
            return None
        return self.staged[schedule.fragment_of(persist.round, self.machine.settings)][0]

    def _end_write(self) -> object:
        if not self.alive or not self._writing:
            return False
        if self.world.disk.full:
            self.world.queue.call_later(AGAIN_S, self._end_write)
            return None
        if self.world.disk.broken and not self.paused:
            self.world.syncer_failed(self, "the disk failed")
        elif self._written():
            self._writing = False
            self.carry_out_waiting()
        return None

    def _written(self) -> bool:
        """A write ends also while the process stands still; what it writes too late counts for nothing."""
        return self._end_or_go_on(fenced=not self.world.disk.end_append(self.term))

    def _end_or_go_on(self, *, fenced: bool) -> bool:
        if self._order.end_write(fenced=fenced):
            return True
        self.end("another syncer has taken over")
        return False

    # ---- carrying out -------------------------------------------------------------------------------------------

    def carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
        if self.lead is not None and (self.lead.hold(effect) or self.lead.carry_out(effect)):
            return
        self._carry_out(effect)

    def _carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
        match effect:
            case syncer_fx.Send(learner, message):
                if isinstance(message, Pull):
                    self._ask(learner, message)
                self.world.network.send_down(self, learner, message)
            case syncer_fx.ConfirmSent(number, attempt, probed):
                self.world.deliver(self, syncer_fx.PullsSent(number, attempt, probed))
            case Note():
                self.world.on_note(effect)
            case syncer_fx.Discard(learner, number, attempt):
                self._discard((learner, number, attempt))
                if self.sums is not None:
                    self.sums.drop_body((learner, number, attempt))
            case syncer_fx.Persist(lines):
                if any(isinstance(line, records.StartedRecord) for line in lines):
                    self.served = [0] * len(self.served)
            case syncer_fx.Merge():
                self._merge(effect)
            case syncer_fx.Commit(number, fragment, version):
                self.theta[fragment] = self.staged.pop(fragment)[1]
                self.served[fragment] = version
                if self.sums is not None:
                    self.sums.settle_round(number, merged=True)
            case syncer_fx.Restore():
                self.restored, ready = self.world.disk.restore_earlier(effect, self.world.outer_lr)
                self.world.queue.call_later(self.world.cut_s(), self.world.deliver, self, ready)
            case syncer_fx.CommitRestored(versions):
                self.theta, self.served = list(self.restored), list(versions)
            case syncer_fx.TakeCut():
                self._take_cut(effect)
            case syncer_fx.CompleteCut(cut):
                self._complete(effect, cut)
            case syncer_fx.Expel(learner, reason):
                self.world.network.expel_learner(self, learner, reason)
            case syncer_fx.Finished():
                self.world.close_later(self)
            case syncer_fx.Retune():
                pass

    def _take_cut(self, effect: syncer_fx.TakeCut) -> None:
        world = self.world
        if effect.first:
            self.theta = list(self.initial)
            world.disk.start = list(self.initial)
        place = len(world.disk.journal)
        if self.lead is not None and not effect.first:
            self.lead.take_cut(effect, list(self.theta), place, world.cut_s())
            return
        if effect.first and world.disk.claim == self.term:  # durable before anything behind it; one deposed drops it
            world.disk.keep_cut(0, effect.history, list(self.theta), place)
        world.queue.call_later(world.cut_s(), self._cut_kept, effect, list(self.theta), place)

    def _cut_kept(self, effect: syncer_fx.TakeCut, theta: list[float], place: int) -> object:
        if not self.alive:
            return False
        reason = "input/output error" if self.world.disk.cuts_fail else ""
        if not reason and self.world.disk.claim == self.term:
            self.world.disk.keep_cut(effect.cut, effect.history, theta, place)
        self.world.deliver(self, syncer_fx.CutKept(effect.cut, reason))
        return None

    def _complete(self, effect: syncer_fx.CompleteCut, cut: int) -> None:
        self.world.on_cut_complete(effect)
        if self.lead is not None:
            return  # `finish_cut` answers
        failed = self.world.disk.cuts_fail
        answer = syncer_fx.CutKept(cut, "input/output error") if failed else syncer_fx.CutWritten(cut, "digest")
        self.world.queue.call_later(0.0, self.world.deliver, self, answer)

    # ---- for its lead of several shards, and for its relays --------------------------------------------------------

    @property
    def refuses_learners(self) -> bool:
        return self.lead is not None and not self.lead.was_whole

    def on_handled(self, machine: type, event: object, effects: Sequence[object]) -> None:
        """Take note of what a part of this process was told, and what it answered."""
        self.world.on_handled(machine, self.name, event, effects)

    def read_clock(self) -> float:
        return self.clock.read(self.world.queue.now)

    def tell_lead_later(self, seconds: float, event: FromShard) -> None:
        assert self.lead is not None
        self.world.queue.call_later(seconds, self.lead.hear_own, event)

    def carry_out_held(self, effect: syncer_fx.SyncerEffect) -> None:
        self.carry_out(effect)

    def watch_decision(self, record: records.MergedRecord) -> None:
        self.world.on_decision(record)

    def session_of(self, learner: str) -> str:
        connection = self.channels.get(learner)
        return connection.learner.session if connection is not None else ""

    def hear_contribution(self, learner: str, message: Contribution) -> None:
        assert self.lead is not None
        if self.paused:
            self.lead.unheard.append((self.lead.hear_contribution, (learner, message)))
        else:
            self.lead.hear_contribution(learner, message)

    def take_initial(self, learner: str, session: str, values: list[float]) -> object:
        """This process has the first parameters, or its part of them."""
        self.initial, self._initial_of = values, (learner, session)
        return self._begin_if_whole(learner, session)

    def note_initial_part(self, message: InitialHere) -> None:
        self._begin_if_whole(message.learner, message.session)

    def _begin_if_whole(self, learner: str, session: str) -> object:
        if self._initial_of != (learner, session) or self.machine.phase != "empty":
            return False
        if self.lead is not None:
            if self.lead.initial != set(self.lead.state.seats):
                return None
            self.lead.end_initial()
        return self.world.deliver(self, syncer_fx.Initialised(learner, session))

    def close_all_learners(self, reason: str) -> None:
        """Those that may have sent first parameters to a shard that is lost."""
        if self.machine.phase == "empty":
            for name in list(self.channels):
                self.world.network.expel_learner(self, name, reason)
                self.world.deliver(self, syncer_fx.Lost(name, reason))

    def stage_own(self, merge: syncer_fx.Merge) -> syncer_fx.Unmergeable | None:
        answer = self.world.answer_merge(merge)
        if isinstance(answer, syncer_fx.Unmergeable):
            return answer
        self._stage(merge)
        return None

    def drop_own(self, fragment: int) -> None:
        self.staged.pop(fragment, None)

    @property
    def complete_cuts(self) -> list[int]:
        """Those that are kept."""
        return self.world.disk.complete

    def finish_first_cut(self, cut: syncer_fx.TakeCut, reason: str) -> None:
        """In all shards; with a reason: it is not, and the syncer starts again."""
        if reason:
            self.world.syncer_failed(self, reason)
            return
        self._take_cut(cut)
        self.world.disk.complete_cut(cut.cut)
        self._writing = False
        if self._end_or_go_on(fenced=self.world.disk.claim != self.term):
            self.carry_out_waiting()

    def keep_cut(self, cut: syncer_fx.TakeCut, theta: list[float], place: int, reason: str) -> None:
        reason = reason or ("input/output error" if self.world.disk.cuts_fail else "")
        if not reason and self.world.disk.claim == self.term:
            self.world.disk.keep_cut(cut.cut, cut.history, theta, place)
        self.world.deliver(self, syncer_fx.CutKept(cut.cut, reason))

    def finish_cut(self, cut: int, reason: str) -> None:
        reason = reason or ("input/output error" if self.world.disk.cuts_fail else "")
        if not reason and self.world.disk.claim == self.term:
            self.world.disk.complete_cut(cut)
        answer = syncer_fx.CutKept(cut, reason) if reason else syncer_fx.CutWritten(cut, "digest")
        self.world.deliver(self, answer)

    # ---- contributions ------------------------------------------------------------------------------------------

    def _ask(self, learner: str, pull: Pull) -> None:
        """This contribution, and no other, may arrive; of probes one at a time."""
        key = (learner, pull.round, pull.attempt)
        if pull.probe:
            self._discard(self._probes.get(learner, key))
            self._probes[learner] = key
        self._asked.add(key)

    def receive(self, key: ContributionKey, payload: Payload) -> bool:
        """A body has come whole; False: nobody asked for it, or it is here already."""
        if key not in self._asked or key in self.payloads:
            return False
        self.payloads[key] = payload.delta
        self.world.on_payload_received(self, key, payload)
        return True

    def receive_part(self, key: ContributionKey, rank: int, part: SentPart) -> bool:
        """A rank's part has come whole; False as above. With the last one the contribution is here."""
        parts, plans = self.parts.setdefault(key, {}), self.rank_plans.get(key[0], ())
        if key not in self._asked or key in self.payloads or rank in parts or not plans:
            return False
        parts[rank] = part
        fragment = part.about.copy.fragment
        if set(parts) == {number for number, plan in enumerate(plans) if plan.sent(fragment).size}:
            self._put_together(key, fragment, {number: parts[number] for number in sorted(parts)}, plans)
        return True

    def _put_together(
        self, key: ContributionKey, fragment: int, parts: dict[int, SentPart], plans: tuple[RankPlan, ...]
    ) -> None:
        self.digests[key] = combine_digests([part.digest for part in parts.values()])
        self.payloads[key] = delta = join_parts(plans, fragment, {rank: one.values for rank, one in parts.items()})
        self.world.on_payload_received(self, key, replace(parts[min(parts)].about, delta=delta))

    def _discard(self, key: ContributionKey) -> None:
        self._asked.discard(key)
        self.held.discard(key)
        for kept in (self.payloads, self.parts, self.digests):
            kept.pop(key, None)

    def _merge(self, merge: syncer_fx.Merge) -> None:
        keys = [((part.learner, merge.round, part.attempt), part.weight) for part in merge.parts]
        if self.sums is not None and (held := [one for one in keys if one[0] in self.held]):
            self.sums.begin_merge(merge, held)
        else:
            self.stage_bodies(merge)

    def stage_bodies(self, merge: syncer_fx.Merge) -> None:
        """All of its contributions are here, or as good as."""
        self._stage(merge)
        self._tell_merged(merge, ())

    def _stage(self, merge: syncer_fx.Merge) -> None:
        for part in merge.parts:
            if parts := self.parts.get((part.learner, merge.round, part.attempt)):
                self.world.on_parts_merged(part.learner, merge.fragment, parts)
        total = sum(part.weight for part in merge.parts)
        deltas = [part.weight * self.payloads[part.learner, merge.round, part.attempt] for part in merge.parts]
        gradient = sum(deltas) / total
        self._stage_gradient(merge.fragment, gradient)

    def _stage_gradient(self, fragment: int, gradient: float) -> None:
        self.staged[fragment] = (gradient, self.theta[fragment] - self.world.outer_lr * gradient)

    # ---- relays -------------------------------------------------------------------------------------------------

    def knows_relay(self, session: str) -> bool:
        return self.alive and self.sums is not None and self.sums.is_connected(session)

    def receive_held(
        self, connection: Connection, session: str, key: ContributionKey, body: HeldBody, payload: Payload
    ) -> bool:
        """A relay holds it in place of the syncer; False: nobody asked for it, or not through that relay."""
        open_ = self.channels.get(key[0]) is connection
        if not open_ or not self.knows_relay(session) or not self.receive(key, payload):
            return False
        assert self.sums is not None
        self.digests[key] = body.digest
        self.held.add(key)
        self.sums.hold_body(session, key, body)
        return True

    def call_later(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        self.world.queue.call_later(seconds, action, *arguments)

    def watch_sums(self, merge: syncer_fx.Merge, counted: Sequence[tuple[ContributionKey, float]]) -> None:
        self.world.on_sums_merged(self, merge, counted)

    def stage_gradient(self, merge: syncer_fx.Merge, gradient: float, groups: tuple[tuple[str, ...], ...]) -> None:
        """Made of sums."""
        self._stage_gradient(merge.fragment, gradient)
        self._tell_merged(merge, groups)

    def _tell_merged(self, merge: syncer_fx.Merge, groups: tuple[tuple[str, ...], ...]) -> None:
        answer = self.world.answer_merge(merge)
        if isinstance(answer, syncer_fx.Merged) and groups:
            answer = msgspec.structs.replace(answer, groups=groups)
        elif isinstance(answer, syncer_fx.Unmergeable) and self.sums is not None:
            self.sums.settle_round(merge.round, merged=False)
        self.world.queue.call_later(self.world.merge_s, self.world.deliver, self, answer)
