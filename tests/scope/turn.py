"""One choice of the small-scope search, carried out: from a state to the next, with every rule checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.scope import checks
from tests.scope.form import clone, form
from tests.scope.world import FAULTS, Choice, SearchedLearner, SearchedSyncer, State, newcomer

from atoll.protocol import records
from atoll.protocol.effects import Note, Tick
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.messages import Contribution
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.machine import Syncer

STEP_S = 0.5
"""How far a step moves the clock."""


def take(state: State, choice: Choice, tell: Callable[[str], None] | None = None) -> State:
    """The state that this choice leads to; `tell` hears what happens on the way."""
    turn = Turn(state, tell)
    turn.take(*choice)
    return turn.done()


class Turn:
    def __init__(self, state: State, tell: Callable[[str], None] | None = None) -> None:
        self.state = replace(state, syncers=dict(state.syncers), learners=dict(state.learners), told=list(state.told))
        self._tell = tell
        self._changed_syncers: set[int] = set()
        self._parties: set[str] = set()
        self._changed_learners: set[str] = set()

    def done(self) -> State:
        """With the forms of what was touched made anew."""
        state = self.state
        for term in self._changed_syncers & state.syncers.keys():
            syncer = state.syncers[term]
            syncer.mark = form(syncer.machine)
            checks.syncer_is_sound(state, syncer)
        for name in self._changed_learners:
            learner = state.learners[name]
            learner.mark = form(learner.process)
            checks.learner_is_sound(state, learner)
        return state

    # ---- copies on the first touch --------------------------------------------------------------------------------

    def syncer(self, term: int) -> SearchedSyncer:
        if term not in self._changed_syncers:
            self._changed_syncers.add(term)
            old = self.state.syncers[term]
            self.state.syncers[term] = SearchedSyncer(
                clone(old.machine),
                order=clone(old.order),
                tasks=list(old.tasks),
                published=list(old.published),
                bodies=set(old.bodies),
                lost=set(old.lost),
            )
        return self.state.syncers[term]

    def learner(self, name: str, *, process: bool = False) -> SearchedLearner:
        """`process`: it is to be changed too, not only its channel."""
        if name not in self._parties:
            self._parties.add(name)
            old = self.state.learners[name]
            self.state.learners[name] = replace(old, up=list(old.up), down=list(old.down))
        learner = self.state.learners[name]
        if process and name not in self._changed_learners:
            self._changed_learners.add(name)
            learner.process = clone(learner.process)
        return learner

    # ---- the choices ----------------------------------------------------------------------------------------------

    def take(self, kind: str, whom: str) -> None:
        if kind in FAULTS:
            self.state.faults -= 1
        match kind:
            case "fsync":
                self._fsync(int(whom))
            case "merge" | "cut":
                syncer = self.syncer(int(whom))
                task = next(one for one in syncer.tasks if isinstance(one, syncer_fx.Merged) == (kind == "merge"))
                syncer.tasks.remove(task)
                self._to_syncer(int(whom), task)
            case "timer" if whom.isdigit():
                self._pass(self.state.syncers[int(whom)].machine.wake_at)
                self._to_syncer(int(whom), Tick())
            case "lost":
                term = next(term for term, syncer in self.state.syncers.items() if whom in syncer.lost)
                self.syncer(term).lost.discard(whom)
                self._to_syncer(term, syncer_fx.Lost(whom, "connection reset"))
            case "crash":
                self._crash(kept="all" in whom)
            case "usurp":
                self._start_syncer()
            case "start":
                self._parties.add(whom)
                self._changed_learners.add(whom)
                session = self.state.learners[whom].session + 1
                self.state.learners[whom] = newcomer(whom, session, self.state.durable.settings)
            case _:
                self._of_learner(kind, whom)

    def _of_learner(self, kind: str, name: str) -> None:
        learner = self.learner(name, process=kind != "up")
        process, now = learner.process, self.state.now
        match kind:
            case "up":
                self._arrive(learner, name)
                return
            case "down":
                message, known = learner.down.pop(0), process.machine.term
                process.tell(now, learner_fx.Arrived(message))
                checks.heard(process, known, message)
            case "body":
                number, attempt = process.uploads.pop(0)
                self.syncer(learner.link).bodies.add((name, number, attempt))
                process.tell(now, learner_fx.Uploaded(number, attempt, "digest"))
            case "whole":
                process.whole = False
                self._to_syncer(learner.link, syncer_fx.Initialised(name, process.machine.session))
            case "fetch":
                fragment = process.fetches.pop(0)
                process.tell(now, learner_fx.Fetched(fragment, self.state.syncers[learner.link].published[fragment]))
            case "state":
                ticket = process.streams.pop(0)
                there = any(ticket in given for one in self._alive() for given in one.process.given.values())
                process.tell(
                    now,
                    learner_fx.StateCame(ticket) if there else learner_fx.StateFailed(ticket, "the connection broke"),
                )
            case "save":
                process.tell(now, learner_fx.Saved(process.saves.pop(0), process.t, "file", "digest"))
            case "step":
                self.state.now = now + STEP_S
                process.step(self.state.now)
            case "timer":
                self._pass(process.machine.wake_at)
                process.tell(self.state.now, Tick())
            case "dial":
                self._dial(name, self.state.term)
            case "stray":
                self._dial(name, min(self.state.syncers))
            case "kill":
                learner.alive = False
                self._break(name)
            case "break":
                self._break(name)
        self._flush(name)

    def _arrive(self, learner: SearchedLearner, name: str) -> None:
        message = learner.up.pop(0)
        event: syncer_fx.SyncerEvent = syncer_fx.Received(name, message)
        if isinstance(message, Contribution):
            checks.contributes(learner, message)
            event = syncer_fx.Delivered(name, message)
        self._to_syncer(learner.link, event)

    def _dial(self, name: str, term: int) -> None:
        learner = self.learner(name, process=True)
        for syncer in [r for r in self.state.syncers if name in self.state.syncers[r].lost]:
            self.syncer(syncer).lost.discard(name)
        learner.link, learner.up, learner.down = term, [], []
        self._to_syncer(term, syncer_fx.Greeted(learner.process.machine.hello()))

    def _break(self, name: str) -> None:
        """The learner notices at once, the syncer later."""
        learner = self.learner(name, process=True)
        if learner.link in self.state.syncers:
            self.syncer(learner.link).lost.add(name)
        self._disconnect(name, "connection reset")

    def _disconnect(self, name: str, reason: str) -> None:
        learner = self.learner(name, process=True)
        linked, learner.link, learner.up, learner.down = learner.link, 0, [], []
        if learner.alive and linked:
            learner.process.cut(self.state.now, reason)

    def _flush(self, name: str) -> None:
        """What a machine said goes into its channel."""
        learner = self.learner(name, process=True)
        if learner.link and learner.alive:
            learner.up += learner.process.said
        learner.process.said = []
        if learner.process.hung_up:
            self._break(name)

    def _alive(self) -> list[SearchedLearner]:
        return [learner for learner in self.state.learners.values() if learner.alive]

    def _pass(self, until: float | None) -> None:
        assert until is not None
        self.state.now = max(self.state.now, until)

    # ---- the syncer's side ------------------------------------------------------------------------------------------

    def _to_syncer(self, term: int, event: syncer_fx.SyncerEvent) -> None:
        syncer = self.syncer(term)
        syncer.order.enqueue(syncer.machine.handle(self.state.now, event))
        checks.woken(self.state, syncer)
        self._carry_on(term)

    def _carry_on(self, term: int) -> None:
        syncer = self.syncer(term)
        syncer.order.carry_out_ready(lambda effect: self._carry_out(term, syncer, effect))

    def _carry_out(self, term: int, syncer: SearchedSyncer, effect: syncer_fx.SyncerEffect) -> None:
        checks.carried_out(self.state, term, syncer, effect)
        match effect:
            case syncer_fx.Send(name, message):
                learner = self.state.learners[name]
                if learner.alive and learner.link == term:
                    self.learner(name).down.append(message)
                    checks.told(self.state, message)
            case syncer_fx.ConfirmSent(number, attempt, probed):
                self._to_syncer(term, syncer_fx.PullsSent(number, attempt, probed))
            case syncer_fx.Merge(number):
                syncer.tasks.append(syncer_fx.Merged(number, "digest"))
            case syncer_fx.TakeCut(cut):
                syncer.tasks.append(syncer_fx.CutKept(cut))
            case syncer_fx.CompleteCut(cut):
                syncer.tasks.append(syncer_fx.CutWritten(cut, "digest"))
            case syncer_fx.Commit(_, fragment, version):
                syncer.published[fragment] = version
            case syncer_fx.Discard(name, number, attempt):
                syncer.bodies.discard((name, number, attempt))
            case syncer_fx.Expel(name, reason):
                if self.state.learners[name].link == term:
                    self._disconnect(name, reason)
            case Note() if self._tell is not None:
                self._tell(effect.text)

    def _fsync(self, term: int) -> None:
        if term < self.state.term:
            self._depose(term)
            return
        syncer = self.syncer(term)
        if isinstance(write := syncer.order.begin_write(), syncer_fx.TakeCut):
            syncer.published = [0] * len(syncer.published)
        else:
            assert write is not None, "something waits for the disk"
            self._write(write)
        syncer.order.end_write(fenced=False)
        self._carry_on(term)

    def _write(self, batch: list[syncer_fx.Persist]) -> None:
        lines = [line for persist in batch for line in persist.records]
        state = self.state
        state.audit = clone(state.audit)
        for line in lines:
            checks.written(state, line)
            state.journal = (*state.journal, line)
        state.durable_mark = form(state.durable)

    def _depose(self, term: int) -> None:
        """The store takes nothing of a term that is over: its syncer ends."""
        for name in [name for name, learner in self.state.learners.items() if learner.link == term]:
            self._disconnect(name, "the syncer was replaced")
        del self.state.syncers[term]

    def _crash(self, kept: bool) -> None:
        if kept:
            self._write(self.state.syncer.next_records())
        self._start_syncer()
        for term in [term for term in self.state.syncers if term < self.state.term]:
            self._depose(term)

    def _start_syncer(self) -> None:
        state = self.state
        checks.nothing_told_is_lost(state)
        reigned = records.TermRecord(state.durable.term + 1, 0, "", state.durable.committed)
        self._write([syncer_fx.Persist((reigned,))])
        machine = Syncer(clone(state.durable))
        state.syncers[state.durable.term] = SearchedSyncer(machine, published=list(state.durable.versions))
        self._changed_syncers.add(state.durable.term)
