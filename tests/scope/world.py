"""The world of the small-scope search: a state is a value, and every choice leads to another one.

In a state are: syncers, each with its machine, the effects that wait for the disk and the merges under way; learners,
each with its machine and training process; the messages in each channel; what is durable. The choices are everything
that could happen next; the search tries them all. turn.py carries a choice out.

    up, down     the oldest message of a channel arrives
    body, whole  an answer, or the first parameters, arrive
    fetch        a version arrives, the newest there is
    state, save  a peer's state arrives; a learner's part of a cut is durable
    step         a learner makes a step
    fsync        what was to be written is durable, and what waited for it is carried out
    merge, cut   the syncer's merge, or its part of a cut, is done
    timer        time passes up to the moment a machine wants to be woken at
    dial, stray  a learner without a connection says hello; to a syncer whose term is over, while one still lives
    lost         the syncer notices that a connection is gone
    start        another process begins under the name of a dead one

and, while faults are left:

    kill         a learner's process dies
    break        a connection is lost, with all that is on it; the learner notices at once, the syncer later
    crash        the syncer dies; its successor knows what is durable: all that was being written, or nothing of it
    usurp        another syncer begins while this one lives on; the store refuses what the old one writes

A message that is not carried out yet and one that is in a channel die alike when the syncer does, so every point
between two effects is covered by the points between two writes. Heartbeats say nothing but the time: there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.scope.form import clone, form
from tests.scope.learner import DATA, PretendLearner

from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import FromLearner, FromSyncer, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.effect_order import EffectOrder
from atoll.protocol.syncer.machine import Syncer
from atoll.store.audit import JournalAudit

Choice = tuple[str, str]
"""What happens, and to whom."""
FAULTS = ("kill", "break", "crash", "usurp")
QUIET_S = 1000.0
"""Between two heartbeats: longer than anything else takes."""


@dataclass(slots=True)
class SearchedSyncer:
    """A syncer. What is in a state is never changed: a turn works on copies."""

    machine: Syncer
    mark: bytes = b""
    """The form of its machine."""
    order: EffectOrder = field(default_factory=EffectOrder)
    """Effects behind one that is to be durable first."""
    tasks: list[fx.SyncerEvent] = field(default_factory=list)
    """Merges and cuts under way, by the events that they end in."""
    published: list[int] = field(default_factory=list)
    """What a fetch gets, per fragment."""
    bodies: set[tuple[str, int, int]] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    """Connections that are gone, which it has not noticed."""

    def next_records(self) -> list[fx.Persist]:
        """What it writes next, if that is not the first cut."""
        write = clone(self.order).begin_write()
        return write if isinstance(write, list) else []


@dataclass(slots=True)
class SearchedLearner:
    """A learner: its machine and process, and its channel to a syncer."""

    process: PretendLearner
    mark: bytes = b""
    link: int = 0
    """The term of the syncer it is connected to; 0: none."""
    up: list[FromLearner] = field(default_factory=list)
    down: list[FromSyncer] = field(default_factory=list)
    alive: bool = True
    session: int = 1


@dataclass(slots=True)
class State:
    now: float
    syncers: dict[int, SearchedSyncer]
    """By term. The newest is the one that the store takes records of."""
    learners: dict[str, SearchedLearner]
    audit: JournalAudit
    """Of the journal, with the fold over it."""
    durable_mark: bytes
    journal: tuple[records.AnyRecord, ...]
    faults: int
    """Still to come."""
    told: list[int]
    """Per fragment, the newest version that any learner was told of."""

    @property
    def durable(self) -> History:
        return self.audit.history

    def form(self) -> bytes:
        """Of all but the clock. The journal counts by what it tells a syncer."""
        syncers = [(t, r.mark.hex(), r.order, r.tasks, r.published, r.bodies, r.lost) for t, r in self.syncers.items()]
        learners = [(p.mark.hex(), p.link, p.up, p.down, p.alive) for p in self.learners.values()]
        return form(syncers, learners, self.durable_mark.hex(), self.faults)

    @property
    def term(self) -> int:
        return max(self.syncers)

    @property
    def syncer(self) -> SearchedSyncer:
        return self.syncers[self.term]


def begin(settings: Settings, faults: int) -> State:
    """Nobody has joined yet."""
    begun = records.BegunRecord("run", settings, {}, (), "plan")
    history = History(begun)
    machine = Syncer(clone(history))
    syncer = SearchedSyncer(machine, form(machine), published=list(machine.versions))
    learners = {name: newcomer(name, 1, settings) for name in (f"learner-{n}" for n in range(settings.learners))}
    return State(0.0, {1: syncer}, learners, JournalAudit(begun), form(history), (), faults, [-1] * settings.fragments)


def newcomer(name: str, session: int, settings: Settings) -> SearchedLearner:
    tensors = (TensorSpec("w", (1,), "float32"),)
    process = PretendLearner(LearnerMachine(name, f"{name}/{session}", tensors), settings.fragments)
    process.hear(0.0, DATA)
    return SearchedLearner(process, form(process), session=session)


# ---- what may happen ----------------------------------------------------------------------------------------------


def choices(state: State) -> Iterator[Choice]:
    for term, syncer in state.syncers.items():
        yield from _of_syncer(state, term, syncer)
    for name, learner in state.learners.items():
        if learner.alive:
            yield from _of_learner(state, name, learner)
        else:
            yield "start", name
    if state.faults:
        yield from _of_faults(state)


def _of_syncer(state: State, term: int, syncer: SearchedSyncer) -> Iterator[Choice]:
    if syncer.order.has_waiting or term < state.term:
        yield "fsync", str(term)
    if any(isinstance(task, fx.Merged) for task in syncer.tasks):
        yield "merge", str(term)
    if any(not isinstance(task, fx.Merged) for task in syncer.tasks):
        yield "cut", str(term)
    for name in sorted(syncer.lost):
        yield "lost", name
    if syncer.machine.wake_at is not None and syncer.machine.phase != "finished":
        yield "timer", str(term)


def _of_learner(state: State, name: str, learner: SearchedLearner) -> Iterator[Choice]:
    process = learner.process
    if learner.link:
        some = {"down": learner.down, "up": learner.up, "body": process.uploads, "fetch": process.fetches}
        yield from ((kind, name) for kind, things in some.items() if things)
        if process.whole:
            yield "whole", name
    elif not process.over:
        yield "dial", name
        if len(state.syncers) > 1:
            yield "stray", name
    if process.streams:
        yield "state", name
    if process.saves:
        yield "save", name
    if process.can_step:
        yield "step", name
    if process.machine.wake_at is not None and process.machine.wake_at < state.now + QUIET_S / 2:
        yield "timer", name


def _of_faults(state: State) -> Iterator[Choice]:
    for name, learner in state.learners.items():
        if learner.alive and not learner.process.over:
            yield "kill", name
            if learner.link:
                yield "break", name
    yield "crash", "with nothing of what it wrote kept"
    if state.syncer.next_records():
        yield "crash", "with all of what it wrote kept"
    if len(state.syncers) == 1:
        yield "usurp", str(state.term)
