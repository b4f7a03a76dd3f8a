"""A world of virtual time: the shipped state machines, one number per fragment, and whatever happens to them.

Learners are islands (island.py, training.py), the syncer is a reign (reign.py), between them lies the network
(network.py, bodies.py) and under the syncer a disk (disk.py). What must hold is checked after every event and at every
effect (invariants.py). Everything that is left to chance comes from one seeded source.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from heapq import heappop
from math import inf

from atoll.protocol import effects as fx
from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate.agenda import Agenda
from atoll.simulate.bodies import Bodies
from atoll.simulate.disk import AGAIN_S, Disk
from atoll.simulate.faults import Fault
from atoll.simulate.invariants import Invariants
from atoll.simulate.island import Island
from atoll.simulate.network import Connection
from atoll.simulate.reign import Reign
from atoll.simulate.trace import Trace
from atoll.simulate.training import Training

Crash = Callable[[fx.SyncerEffect, str], bool]


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
        theta: float = 1.0,
        gradient: Callable[[int], float] = lambda t: 1.0,
        direct: bool = True,
        courier_s: float = 0.0,
        down_s: float = 0.5,
        merge_s: float = 0.0,
        data: fx.Registered | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings
        self.begun = records.Begun("run", settings, {}, (), "plan")
        self.agenda, self.random = Agenda(), random.Random(seed)
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
        self.islands: dict[str, Island] = {}
        """By name, the newest process of that name."""
        self.processes: list[Island] = []
        """All that live."""
        self._sessions = 0
        self.disk = Disk(self.begun, self.random, sync_s=sync_s, every_round=every_round)
        self.disk.claim = 1
        self.network = Bodies(self, latency_s, jitter)
        self.reign = Reign(self, History(self.begun), [theta] * settings.fragments)
        """The syncer of the newest term."""
        self.reigns = [self.reign]
        """Every syncer's process that lives."""
        self.invariants = Invariants(self)

    @property
    def now(self) -> float:
        return self.agenda.now

    @property
    def syncer(self) -> Syncer:
        return self.reign.machine

    # ---- time ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let the next thing happen. One that no machine is told of counts as an event of its own."""
        before = self.events
        if self.agenda.step() and self.events == before:
            self.events += 1

    def run(self, until: float, most_events: float = inf) -> None:
        """To this moment, the end, or so many events."""
        agenda, queue = self.agenda, self.agenda.queue
        while queue and queue[0][0] <= until and not self.finished and self.events < most_events:
            before = self.events
            agenda.now, _, action, arguments = heappop(queue)
            if action(*arguments) is not False and self.events == before:
                self.events += 1

    # ---- machines -----------------------------------------------------------------------------------------------

    def tell(self, reign: Reign, event: fx.SyncerEvent, least: float = 0.0) -> list[fx.SyncerEffect]:
        return reign.tell(event, least)

    def syncer_handled(
        self, reign: Reign, now: float, event: fx.SyncerEvent, effects: Sequence[fx.SyncerEffect]
    ) -> None:
        self.events += 1
        if self.trace is not None:
            self.trace.add(now, reign.name, event, effects)
        self.invariants.check(reign, now, event)

    def learner_handled(self, island: Island, event: fx.LearnerEvent, effects: Sequence[fx.LearnerEffect]) -> None:
        self.events += 1
        if self.trace is not None:
            self.trace.add(self.agenda.now, island.session, event, effects)
        self.invariants.heard(island, event, effects)

    def carry_out(self, reign: Reign, effect: fx.SyncerEffect) -> None:
        if self.crash is not None and self.crash(effect, "before"):
            self.crash_syncer()
            return
        self.invariants.see(reign, effect)
        reign.carry_out(effect)
        if self.crash is not None and reign.alive and self.crash(effect, "after"):
            self.crash_syncer()

    def obey(self, island: Island, effect: fx.LearnerEffect) -> None:
        island.obey(effect)

    # ---- learners -----------------------------------------------------------------------------------------------

    def join(self, name: str, step_s: float = 1.0, *, kept: bool = False) -> Island:
        """A new training process under this name, not connected yet; the one before it is gone."""
        if (old := self.islands.get(name)) is not None and old.alive:
            self.end_process(old)
        return self.start_process(name, step_s, kept=kept)

    def start_process(self, name: str, step_s: float, *, kept: bool = False) -> Island:
        self._sessions += 1
        session = f"{name}/{self._sessions}"
        island = Island(self, name, session, step_s, self.gradient, kept=kept, data=self.data)
        self.islands[name] = island
        self.processes.append(island)
        return island

    def end_process(self, island: Island) -> None:
        """Without a word: who is connected to it has to notice."""
        island.alive = False
        island.connection = None
        self.processes = [one for one in self.processes if one is not island]

    def kill(self, island: Island, reason: str = "killed") -> None:
        """Its host closes its connections."""
        if (connection := island.connection) is not None:
            self.network.closed_by(connection, reason)
        self.end_process(island)

    def connections(self, island: Island) -> list[Connection]:
        """Those of which one end still stands."""
        found = [island.connection] if island.connection is not None else []
        for reign in self.reigns:
            connection = reign.channels.get(island.name)
            if connection is not None and connection.island is island and connection not in found:
                found.append(connection)
        return found

    def syncer_at(self, island: Island) -> Reign | None:
        """Whom a dial reaches: of several syncers any."""
        alive = [reign for reign in self.reigns if reign.alive]
        return alive[0] if len(alive) == 1 else self.random.choice(alive) if alive else None

    # ---- the syncer ---------------------------------------------------------------------------------------------

    def crash_syncer(self, down_s: float | None = None, *, power: bool = False) -> None:
        """Its process dies (`power`: with its machine); a new one reads what is durable, in a new term."""
        for reign in self.reigns if power else [self.reign]:
            reign.end("the syncer died")
        self.reigns = [reign for reign in self.reigns if reign.alive]
        if power:
            self.disk.power_cut()
        self.agenda.later(self.down_s if down_s is None else down_s, self.new_reign, self.disk.claim)

    def syncer_failed(self, reign: Reign, reason: str) -> None:
        """It ended by itself; whoever watches it starts another."""
        reign.end(reason)
        self.reigns = [one for one in self.reigns if one.alive]
        self.agenda.later(self.down_s, self.new_reign, reign.term)

    def new_reign(self, after: int) -> object:
        """The successor of that term, unless it has one."""
        if self.disk.claim != after or self.finished:
            return False
        if self.disk.full or self.disk.broken:
            self.agenda.later(self.down_s, self.new_reign, after)
            return None
        history, theta = self.disk.recover(self.outer_lr)
        self.disk.reign(history)
        before, self.reign = self.reign, Reign(self, history, theta or list(before_start(self)))
        self.reigns = [reign for reign in (*self.reigns, self.reign) if reign.alive]
        self.reign.clock.ahead_s = before.clock.ahead_s
        self.invariants.restarted(self.reign)
        self.begin(self.reign)
        return None

    def begin(self, reign: Reign) -> None:
        self.tell(reign, fx.Tick())
        reign.beat()

    def finishing(self, reign: Reign) -> None:
        """The committed versions are the result; whoever is still there fetches the last of them."""
        self.agenda.later(20 * self.network.latency_s + 2.0, self.close, reign)

    def close(self, reign: Reign) -> object:
        if not reign.alive:
            return False
        if reign.paused:
            self.agenda.later(1.0, self.close, reign)
            return False
        self.tell(reign, fx.Over())
        return self._finish_when_written(reign)

    def _finish_when_written(self, reign: Reign) -> object:
        """As the service does: it is over once its last records are durable. One that finds then that another term was
        claimed, or whose disk fails, ends without them, and its successor brings the run to its end."""
        if not reign.alive:
            return False
        if reign.has_unwritten:
            self.agenda.later(AGAIN_S, self._finish_when_written, reign)
            return False
        self.finished = True
        return None

    # ---- what others decide or look at ----------------------------------------------------------------------------

    def cut_s(self) -> float:
        return self.network.delay()

    def merged(self, merge: fx.Merge) -> fx.SyncerEvent:
        if (merge.round, merge.parts[0].attempt) in self.unmergeable:
            return fx.Unmergeable(merge.round, "the merged norm is absurd", reset=self.overflow)
        return fx.Merged(merge.round, "digest")

    def adopted(self, island: Training, adopt: fx.Adopt, value: float, dropped: int) -> None:
        """It is about to be adopted, after which so many tokens of the fragment are dropped in all."""
        self.invariants.adopted(island, adopt, value, dropped)

    def blocks(self, island: Training) -> None:
        self.invariants.blocks(island)

    def step_s(self, island: Training) -> float:
        """How long the step takes that begins now."""
        return island.step_s

    def stepped(self, island: Training) -> None:
        """A step is behind it."""

    def happened(self, fault: Fault) -> None:
        """A fault begins."""

    def noted(self, note: fx.Note) -> None:
        """For those that keep a story."""

    def informed(self, island: Island, progress: float) -> None:
        """A learner heard how far the run is."""

    def cut_complete(self, cut: fx.CompleteCut) -> None:
        """A cut is complete."""


def before_start(world: World) -> list[float]:
    return [world.start_theta] * world.settings.fragments
