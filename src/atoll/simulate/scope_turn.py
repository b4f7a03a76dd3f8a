"""One choice of the small-scope search, carried out: from a state to the next, with every rule checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.protocol import effects as fx
from atoll.protocol import records
from atoll.protocol.messages import Contribution
from atoll.protocol.syncer.machine import Syncer
from atoll.simulate import scope_checks as checks
from atoll.simulate.scope_form import clone, form
from atoll.simulate.scope_world import FAULTS, Choice, Party, Ruler, State, newcomer

STEP_S = 0.5
"""How far a step moves the clock."""


def take(state: State, choice: Choice, tell: Callable[[str], None] | None = None) -> State:
    """The state that this choice leads to; `tell` hears what happens on the way."""
    turn = Turn(state, tell)
    turn.take(*choice)
    return turn.done()


class Turn:
    def __init__(self, state: State, tell: Callable[[str], None] | None = None) -> None:
        self.state = replace(state, rulers=dict(state.rulers), parties=dict(state.parties), told=list(state.told))
        self._tell = tell
        self._rulers: set[int] = set()
        self._parties: set[str] = set()
        self._islands: set[str] = set()

    def done(self) -> State:
        """With the forms of what was touched made anew."""
        state = self.state
        for term in self._rulers & state.rulers.keys():
            ruler = state.rulers[term]
            ruler.mark = form(ruler.machine)
            checks.syncer_is_sound(state, ruler)
        for name in self._islands:
            party = state.parties[name]
            party.mark = form(party.island)
            checks.learner_is_sound(state, party)
        return state

    # ---- copies on the first touch --------------------------------------------------------------------------------

    def ruler(self, term: int) -> Ruler:
        if term not in self._rulers:
            self._rulers.add(term)
            old = self.state.rulers[term]
            self.state.rulers[term] = Ruler(
                clone(old.machine),
                waiting=list(old.waiting),
                tasks=list(old.tasks),
                published=list(old.published),
                bodies=set(old.bodies),
                lost=set(old.lost),
            )
        return self.state.rulers[term]

    def party(self, name: str, *, island: bool = False) -> Party:
        """`island`: it is to be changed too, not only its channel."""
        if name not in self._parties:
            self._parties.add(name)
            old = self.state.parties[name]
            self.state.parties[name] = replace(old, up=list(old.up), down=list(old.down))
        party = self.state.parties[name]
        if island and name not in self._islands:
            self._islands.add(name)
            party.island = clone(party.island)
        return party

    # ---- the choices ----------------------------------------------------------------------------------------------

    def take(self, kind: str, whom: str) -> None:
        if kind in FAULTS:
            self.state.faults -= 1
        match kind:
            case "fsync":
                self._fsync(int(whom))
            case "merge" | "cut":
                ruler = self.ruler(int(whom))
                task = next(one for one in ruler.tasks if isinstance(one, fx.Merged) == (kind == "merge"))
                ruler.tasks.remove(task)
                self._to_syncer(int(whom), task)
            case "timer" if whom.isdigit():
                self._pass(self.state.rulers[int(whom)].machine.wake_at)
                self._to_syncer(int(whom), fx.Tick())
            case "lost":
                term = next(term for term, ruler in self.state.rulers.items() if whom in ruler.lost)
                self.ruler(term).lost.discard(whom)
                self._to_syncer(term, fx.Lost(whom, "connection reset"))
            case "crash":
                self._crash(kept="all" in whom)
            case "usurp":
                self._reign()
            case "start":
                self._parties.add(whom)
                self._islands.add(whom)
                session = self.state.parties[whom].session + 1
                self.state.parties[whom] = newcomer(whom, session, self.state.durable.settings)
            case _:
                self._of_party(kind, whom)

    def _of_party(self, kind: str, name: str) -> None:
        party = self.party(name, island=kind != "up")
        island, now = party.island, self.state.now
        match kind:
            case "up":
                self._arrive(party, name)
                return
            case "down":
                message, known = party.down.pop(0), island.machine.term
                island.tell(now, fx.Arrived(message))
                checks.heard(island, known, message)
            case "body":
                number, attempt = island.uploads.pop(0)
                self.ruler(party.link).bodies.add((name, number, attempt))
                island.tell(now, fx.Uploaded(number, attempt, "digest"))
            case "whole":
                island.whole = False
                self._to_syncer(party.link, fx.Initialised(name))
            case "fetch":
                fragment = island.fetches.pop(0)
                island.tell(now, fx.Fetched(fragment, self.state.rulers[party.link].published[fragment]))
            case "state":
                ticket = island.streams.pop(0)
                there = any(ticket in given for one in self._alive() for given in one.island.given.values())
                island.tell(now, fx.StateCame(ticket) if there else fx.StateFailed(ticket, "the connection broke"))
            case "save":
                island.tell(now, fx.Saved(island.saves.pop(0), island.t, "file", "digest"))
            case "step":
                self.state.now = now + STEP_S
                island.step(self.state.now)
            case "timer":
                self._pass(island.machine.wake_at)
                island.tell(self.state.now, fx.Tick())
            case "dial":
                self._dial(name, self.state.term)
            case "stray":
                self._dial(name, min(self.state.rulers))
            case "kill":
                party.alive = False
                self._break(name)
            case "break":
                self._break(name)
        self._flush(name)

    def _arrive(self, party: Party, name: str) -> None:
        message = party.up.pop(0)
        event: fx.SyncerEvent = fx.Received(name, message)
        if isinstance(message, Contribution):
            checks.contributes(party, message)
            event = fx.Delivered(name, message)
        self._to_syncer(party.link, event)

    def _dial(self, name: str, term: int) -> None:
        party = self.party(name, island=True)
        for ruler in [r for r in self.state.rulers if name in self.state.rulers[r].lost]:
            self.ruler(ruler).lost.discard(name)
        party.link, party.up, party.down = term, [], []
        self._to_syncer(term, fx.Greeted(party.island.machine.hello()))

    def _break(self, name: str) -> None:
        """The learner notices at once, the syncer later."""
        party = self.party(name, island=True)
        if party.link in self.state.rulers:
            self.ruler(party.link).lost.add(name)
        self._cut(name, "connection reset")

    def _cut(self, name: str, reason: str) -> None:
        party = self.party(name, island=True)
        linked, party.link, party.up, party.down = party.link, 0, [], []
        if party.alive and linked:
            party.island.cut(self.state.now, reason)

    def _flush(self, name: str) -> None:
        """What a machine said goes into its channel."""
        party = self.party(name, island=True)
        if party.link and party.alive:
            party.up += party.island.said
        party.island.said = []
        if party.island.hung_up:
            self._break(name)

    def _alive(self) -> list[Party]:
        return [party for party in self.state.parties.values() if party.alive]

    def _pass(self, until: float | None) -> None:
        assert until is not None
        self.state.now = max(self.state.now, until)

    # ---- the syncer's side ------------------------------------------------------------------------------------------

    def _to_syncer(self, term: int, event: fx.SyncerEvent) -> None:
        ruler = self.ruler(term)
        ruler.waiting += ruler.machine.handle(self.state.now, event)
        checks.woken(self.state, ruler)
        self._carry_on(term)

    def _carry_on(self, term: int) -> None:
        """Everything up to the first that must be durable and is not."""
        ruler = self.ruler(term)
        while ruler.waiting and not _must_wait(ruler.waiting[0]):
            self._carry_out(term, ruler, ruler.waiting.pop(0))

    def _carry_out(self, term: int, ruler: Ruler, effect: fx.SyncerEffect) -> None:
        checks.carried_out(self.state, term, ruler, effect)
        match effect:
            case fx.Send(name, message):
                party = self.state.parties[name]
                if party.alive and party.link == term:
                    self.party(name).down.append(message)
                    checks.told(self.state, message)
            case fx.ConfirmSent(number, attempt, probed):
                self._to_syncer(term, fx.PullsSent(number, attempt, probed))
            case fx.Merge(number):
                ruler.tasks.append(fx.Merged(number, "digest"))
            case fx.TakeCut(cut):
                ruler.tasks.append(fx.CutKept(cut))
            case fx.CompleteCut(cut):
                ruler.tasks.append(fx.CutWritten(cut, "digest"))
            case fx.Commit(_, fragment, version):
                ruler.published[fragment] = version
            case fx.Discard(name, number, attempt):
                ruler.bodies.discard((name, number, attempt))
            case fx.Expel(name, reason):
                if self.state.parties[name].link == term:
                    self._cut(name, reason)
            case fx.Note() if self._tell is not None:
                self._tell(effect.text)

    def _fsync(self, term: int) -> None:
        if term < self.state.term:
            self._depose(term)
            return
        ruler = self.ruler(term)
        if isinstance(ruler.waiting[0], fx.TakeCut):
            ruler.waiting.pop(0)
            ruler.published = [0] * len(ruler.published)
        else:
            end = _batch(ruler.waiting)
            self._write(ruler.waiting[:end])
            ruler.waiting[:end] = [one for one in ruler.waiting[:end] if not isinstance(one, fx.Persist)]
        self._carry_on(term)

    def _write(self, effects: list[fx.SyncerEffect]) -> None:
        lines = [line for effect in effects if isinstance(effect, fx.Persist) for line in effect.records]
        state = self.state
        state.durable = clone(state.durable)
        for line in lines:
            checks.written(state, line)
            state.durable.apply(line)
            state.journal = (*state.journal, line)
        state.durable_mark = form(state.durable)

    def _depose(self, term: int) -> None:
        """The store takes nothing of a term that is over: its syncer ends."""
        for name in [name for name, party in self.state.parties.items() if party.link == term]:
            self._cut(name, "the syncer was replaced")
        del self.state.rulers[term]

    def _crash(self, kept: bool) -> None:
        if kept:
            waiting = self.state.ruler.waiting
            self._write(waiting[: _batch(waiting)])
        self._reign()
        for term in [term for term in self.state.rulers if term < self.state.term]:
            self._depose(term)

    def _reign(self) -> None:
        state = self.state
        checks.nothing_told_is_lost(state)
        reigned = records.Reigned(state.durable.term + 1, 0, "", state.durable.committed)
        self._write([fx.Persist((reigned,))])
        syncer = Syncer(clone(state.durable))
        state.rulers[state.durable.term] = Ruler(syncer, published=list(state.durable.versions))
        self._rulers.add(state.durable.term)


def _must_wait(effect: fx.SyncerEffect) -> bool:
    return isinstance(effect, fx.Persist) or (isinstance(effect, fx.TakeCut) and effect.first)


def _batch(waiting: list[fx.SyncerEffect]) -> int:
    """How far one write reaches: up to a cut, or to an outer gradient that is not the first of it."""
    some = False
    for place, effect in enumerate(waiting):
        if isinstance(effect, fx.TakeCut) or (isinstance(effect, fx.Persist) and effect.round >= 0 and some):
            return place
        some = some or isinstance(effect, fx.Persist)
    return len(waiting)
