"""A small world of virtual time for the two state machines: real rules, one number per fragment instead of tensors.

Training follows the boundary order of the real training process: adopt what has arrived, make the copies that are due,
then (synchronous runs) wait. Messages and bodies take `latency_s`, with up to `jitter` of it more (seeded; order kept
on each channel); nothing else takes time but the learners' steps. Invariants are checked at every effect of the syncer.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.protocol.invariants import Invariants

from atoll.protocol import effects as fx
from atoll.protocol import records
from atoll.protocol.history import History
from atoll.protocol.learner import Learner
from atoll.protocol.messages import Contribution, FromLearner, FromSyncer, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import Syncer

TENSORS = (TensorSpec("w", (1,), "float32"),)


@dataclass
class Copy:
    value: float
    base: float
    fact: fx.Copied
    sent: bool = False


@dataclass
class Given:
    """A copy of a peer's inner optimizer, for whoever brings a ticket."""

    giver: Island
    moments: int
    t: int
    held: list[int]
    """The versions in its giver's model when it was made."""
    tickets: set[str] = field(default_factory=set)


@dataclass
class Island:
    """A learner with its training process."""

    machine: Learner
    fragments: int
    step_s: float
    theta: list[float]
    gradient: Callable[[int], float]
    tokens_per_step: int = 10
    alive: bool = True
    linked: bool = False
    channel: int = 0
    """Counts its connections: what was sent on an old one never arrives."""
    answers: bool = True
    """False: it reports but its bodies never arrive."""
    broken: bool = False
    """True: its contributions fail screening, until its inner optimizer starts afresh."""
    paused: bool = False
    """True: it makes no steps; its courier lives."""
    saves: bool = True
    """False: it never comes to save its part of a cut."""
    silent: bool = False
    """True: what it says never arrives."""
    stream_s: float = 0.0
    """How long its inner optimizer's state takes to a newcomer."""
    state_bytes: int = 100
    fits: bool = True
    """False: a peer's inner optimizer does not fit its own."""
    moments: int = 0
    """Stands for the inner optimizer's state: the steps that went into it."""
    source: str = ""
    """The peer whose inner optimizer it took."""
    waits: bool = False
    """A peer's state is on its way."""
    fetching: str = ""
    """The ticket it fetches, or takes at the next boundary."""
    arrived: Given | None = None
    capture: int = 0
    """The copy it makes at the next boundary."""
    given: dict[int, Given] = field(default_factory=dict)
    t: int = 0
    tokens_total: int = 0
    done: bool = False
    """Told to stop."""
    stopped: bool = False
    over: bool = False
    """Told that nothing more will be asked of it."""
    failed: bool = False
    blocked: bool = False
    training: bool = False
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    position: int = -1
    """Leased samples it has taken."""
    base: list[float] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    fetched: dict[int, float] = field(default_factory=dict)
    reads: dict[int, fx.Read] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)
    inbox: list[tuple[fx.Adopt, float]] = field(default_factory=list)
    copies: dict[tuple[int, int], Copy] = field(default_factory=dict)
    history: list[tuple[float, ...]] = field(default_factory=list)
    adoptions: list[tuple[int, int, int]] = field(default_factory=list)
    """(t, fragment, version)."""
    informed: list[float] = field(default_factory=list)
    arrives: dict[str, float] = field(default_factory=dict)
    """Per direction, when the last message arrives."""

    def __post_init__(self) -> None:
        self._zero()
        self.base, self.adopted = list(self.theta), [-1] * self.fragments

    def _zero(self) -> None:
        self.steps, self.tokens = [0] * self.fragments, [0] * self.fragments
        self.dropped = [0] * self.fragments

    def forget(self, reset: bool) -> None:
        self._zero()
        self.adopted = [-1] * self.fragments
        self.broken = self.broken and not reset
        self.moments = 0 if reset else self.moments
        self.inbox, self.reads, self.holds = [], {}, {}

    def holding(self, fragment: int | None = None) -> bool:
        return any(
            step <= self.t and fragment in (None, number % self.fragments) for number, step in self.holds.items()
        )


class World:
    def __init__(
        self,
        learners: int = 3,
        *,
        step_s: float | list[float] = 1.0,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        outer_lr: float = 1.0,
        theta: float = 1.0,
        gradient: Callable[[int], float] = lambda t: 1.0,
        present: int | None = None,
        direct: bool = True,
        courier_s: float = 0.0,
        **settings: Any,
    ) -> None:
        settings.setdefault("fragments", 2)
        settings.setdefault("sync_every", max(4, settings["fragments"]))
        self.settings = Settings(learners=learners, **settings).resolved(1000)
        self.begun = records.Begun("run", self.settings, {}, (), "plan")
        self.syncer = Syncer(History(self.begun))
        self.journal: list[records.AnyRecord] = []
        """What is durable."""
        self.crash: Callable[[fx.SyncerEffect, str], bool] = lambda effect, when: False
        """Asked "before" and "after" every effect of the syncer: whether its process dies there."""
        self.outages: list[float] = []
        self.complete: list[fx.CompleteCut] = []
        """Cuts that were completed."""
        self.invariants = Invariants(self)
        self.direct = direct
        """Whether newcomers reach their peers without the syncer."""
        self.courier_s = courier_s
        """How long the word that the run ends takes from a courier to its training process, which trains on."""
        self.now, self.latency_s, self.jitter, self.outer_lr = 0.0, latency_s, jitter, outer_lr
        self.random = random.Random(seed)
        self.gradient = gradient
        self.start_theta = theta
        self.theta = [theta] * self.settings.fragments
        self.durable = list(self.theta)
        self.staged: dict[int, float] = {}
        self.bodies: dict[tuple[str, int, int], float] = {}
        self.unmergeable: set[tuple[int, int]] = set()
        """(round, attempt) whose merge comes to nothing."""
        self.attempts: dict[int, int] = {}
        self.notes: list[tuple[float, fx.Note]] = []
        self.log: list[tuple[float, fx.SyncerEffect]] = []
        self.finished = False
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count()
        self.islands: dict[str, Island] = {}
        self.speeds = step_s if isinstance(step_s, list) else [step_s] * learners
        for index in range(learners if present is None else present):
            self.join(f"learner-{index}", step_s=self.speeds[index])

    # ---- what a test does to it ---------------------------------------------------------------------------------

    def join(self, name: str, step_s: float = 1.0, *, kept: bool = False) -> Island:
        """A new training process under this name; `kept`: with an inner optimizer out of a cut."""
        machine = Learner(name, f"session-{next(self._sessions)}", TENSORS, kept=kept)
        theta = [self.start_theta] * self.settings.fragments
        island = Island(machine, self.settings.fragments, step_s, theta, self.gradient)
        if (old := self.islands.get(name)) is not None:
            old.alive = old.linked = False
            island.channel = old.channel
        self.islands[name] = island
        self.link(name)
        return island

    def link(self, name: str) -> None:
        island = self.islands[name]
        island.linked, island.channel = True, island.channel + 1
        self._tell(fx.Greeted(island.machine.hello()))

    def kill(self, name: str) -> None:
        self.islands[name].alive = False
        self.unlink(name, "killed")

    def unlink(self, name: str, reason: str = "connection reset") -> None:
        island = self.islands[name]
        if island.linked:
            island.linked = False
            self._tell(fx.Lost(name, reason))
            self._hear(island, fx.Cut(reason))

    def restart_courier(self, name: str) -> None:
        """A new machine takes over; the training process drops the orders of the dead one."""
        island = self.islands[name]
        self.unlink(name, "courier died")
        old = island.machine
        island.machine = Learner(name, old.session, TENSORS)
        held, stepped = list(island.adopted), self._stepped(island)
        island.machine.restore(old.run, held, stepped, old.incarnation, seeking=island.waits)
        island.reads, island.holds, island.inbox = {}, {}, []
        island.capture, island.given, island.fetching, island.arrived = 0, {}, "", None
        self.link(name)
        self._if_idle(island)

    def replace_syncer(self, run: str) -> None:
        """The syncer's process is another one, with another run."""
        for name in self.islands:
            if self.islands[name].linked:
                self.islands[name].linked = False
                self._hear(self.islands[name], fx.Cut("the syncer died"))
        self.begun = records.Begun(run, self.settings, {}, (), "plan")
        self.syncer, self.journal = Syncer(History(self.begun)), []
        self.invariants = Invariants(self)
        self.staged, self.bodies = {}, {}
        for name, island in self.islands.items():
            if island.alive:
                self.link(name)

    def crash_syncer(self, down_s: float = 0.5, apart_s: float = 0.0) -> None:
        """Its process dies; a new one reads what is durable, in a new term. Learners come back `apart_s` one by one."""
        self.outages.append(self.now)
        history = History(self.begun)
        for record in self.journal:
            history.apply(record)
        reigned = records.Reigned(history.term + 1, 0, "", history.committed)
        history.apply(reigned)
        self.journal.append(reigned)
        for island in self.islands.values():
            if island.linked:
                island.linked = False
                self._hear(island, fx.Cut("the syncer died"))
        self.syncer = Syncer(history)
        self.theta, self.staged, self.bodies = list(self.durable), {}, {}
        self.invariants.restarted()
        for number, name in enumerate(self.islands):
            self._later(down_s + number * apart_s, lambda name=name: self._redial(name))

    def _redial(self, name: str) -> None:
        if self.islands[name].alive and not self.islands[name].linked:
            self.link(name)

    def pause(self, name: str) -> None:
        self.islands[name].paused = True

    def resume(self, name: str) -> None:
        island = self.islands[name]
        if island.paused:
            island.paused = False
            self._soon(island)
            if island.training:
                self._later(island.step_s, lambda: self._train(island))

    def end(self, reason: str = "asked to") -> None:
        self._tell(fx.EndAsked(reason))

    def inject(self, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        """An event from nowhere."""
        return self._tell(event)

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        self._later(seconds - self.now, action)

    def run_until(self, *, round: int | None = None, seconds: float | None = None) -> World:
        limit = self.now + (seconds if seconds is not None else 100_000.0)
        while self._queue and not self.finished:
            if round is not None and self.syncer.committed >= round:
                return self
            if self._queue[0][0] > limit:
                break
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if seconds is not None and not self.finished:
            self.now = max(self.now, limit)
        elif round is not None and self.syncer.committed < round:
            raise AssertionError(f"the world came to rest in round {self.syncer.committed}:\n{self.story()}")
        return self

    def run_to_end(self, seconds: float = 100_000) -> World:
        self.run_until(seconds=seconds)
        assert self.finished, f"the run does not end: {self.syncer.phase}\n{self.story()}"
        return self

    # ---- what a test looks at -----------------------------------------------------------------------------------

    def said(self, kind: str) -> list[fx.Note]:
        return [note for _, note in self.notes if note.kind == kind]

    def round_note(self, number: int) -> dict[str, Any]:
        return next(note.data for note in self.said("round") if note.data["round"] == number)

    def members(self, number: int) -> set[str]:
        return {member["learner"] for member in self.round_note(number)["members"]}

    def sent(self, kind: type[Any], learner: str | None = None) -> list[tuple[float, Any]]:
        """(when, message) of what the syncer sent."""
        return [
            (at, effect.message)
            for at, effect in self.log
            if isinstance(effect, fx.Send) and isinstance(effect.message, kind) and learner in (None, effect.learner)
        ]

    def commits(self) -> list[tuple[float, fx.Commit]]:
        return [(at, effect) for at, effect in self.log if isinstance(effect, fx.Commit)]

    def merged_steps(self, learner: str, fragment: int) -> int:
        """Steps of this fragment that went into the model, over all rounds."""
        return sum(
            member["steps"]
            for note in self.said("round")
            if note.data["fragment"] == fragment
            for member in note.data["members"]  # type: ignore[attr-defined]
            if member["learner"] == learner
        )

    def story(self) -> str:
        return "\n".join(f"{at:8.3f} {note.text}" for at, note in self.notes[-40:])

    # ---- the syncer's side --------------------------------------------------------------------------------------

    def _later(self, delay: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (self.now + max(0.0, delay), next(self._order), action))

    def _delay(self, times: float = 1.0) -> float:
        return times * self.latency_s * (1 + self.jitter * self.random.random())

    def _tell(self, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        syncer = self.syncer
        effects = syncer.handle(self.now, event)
        self.invariants.check()
        for effect in effects:
            if self.crash(effect, "before"):
                self.crash_syncer()
                return effects
            self.log.append((self.now, effect))
            self.invariants.see(effect)
            self._carry_out(effect)
            if self.crash(effect, "after"):
                self.crash_syncer()
                return effects
            if syncer is not self.syncer:
                return effects
        if (wake := syncer.wake_at) is not None:
            self._later(wake - self.now, lambda: self._wake_syncer(syncer, wake))
        return effects

    def _wake_syncer(self, syncer: Syncer, wake: float) -> None:
        if syncer is self.syncer and syncer.wake_at == wake:
            self._tell(fx.Tick())

    def _carry_out(self, effect: fx.SyncerEffect) -> None:
        match effect:
            case fx.Send(learner, message):
                self._deliver(learner, message)
            case fx.Merge():
                self._merge(effect)
            case fx.Persist(lines, number):
                self.journal.extend(lines)
                for line in lines:
                    if isinstance(line, records.Merged):
                        assert line.round == number, "its outer gradient goes with it"
                        self.durable[line.fragment] = self.staged[line.fragment]
                    elif isinstance(line, records.Started):
                        self.durable = list(self.theta)
            case fx.Retune():
                pass
            case fx.TakeCut(cut):
                syncer = self.syncer
                self._later(self._delay(), lambda: syncer is self.syncer and self._tell(fx.CutKept(cut)))
            case fx.CompleteCut(cut):
                syncer = self.syncer
                self.complete.append(effect)
                self._later(0.0, lambda: syncer is self.syncer and self._tell(fx.CutWritten(cut, "digest")))
            case fx.Commit(_, fragment, _):
                self.theta[fragment] = self.staged.pop(fragment)
            case fx.Discard(learner, number, attempt):
                self.bodies.pop((learner, number, attempt), None)
            case fx.Expel(learner, reason):
                island = self.islands[learner]
                island.linked = False
                self._later(self._delay(), lambda: self._hear(island, fx.Cut(reason)))
            case fx.Finished():
                self._later(20 * self.latency_s + 2.0, self._finish)
            case fx.Note():
                self.notes.append((self.now, effect))

    def _finish(self) -> None:
        self.finished = True

    def _merge(self, merge: fx.Merge) -> None:
        syncer, answer = self.syncer, fx.Merged(merge.round, "digest")
        total = sum(part.weight for part in merge.parts)
        deltas = [part.weight * self.bodies[part.learner, merge.round, part.attempt] for part in merge.parts]
        self.staged[merge.fragment] = self.theta[merge.fragment] - self.outer_lr * sum(deltas) / total
        if (merge.round, merge.parts[0].attempt) in self.unmergeable:
            unmergeable = fx.Unmergeable(merge.round, "the merged norm is absurd")
            self._later(0.0, lambda: syncer is self.syncer and self._tell(unmergeable))
        else:
            self._later(0.0, lambda: syncer is self.syncer and self._tell(answer))

    def _on_channel(self, island: Island, way: str, action: Callable[[], object]) -> None:
        """In order, and only while this connection lasts."""
        channel = island.channel
        at = max(self.now + self._delay(), island.arrives.get(way, 0.0))
        island.arrives[way] = at
        self._later(at - self.now, lambda: island.linked and island.channel == channel and action())

    def _deliver(self, name: str, message: FromSyncer) -> None:
        island = self.islands[name]
        if island.linked and island.alive:
            self._on_channel(island, "down", lambda: self._hear(island, fx.Arrived(message)))

    # ---- the learners' side -------------------------------------------------------------------------------------

    def _hear(self, island: Island, event: fx.LearnerEvent) -> None:
        if not island.alive:
            return
        machine = island.machine
        for effect in machine.handle(self.now, event):
            self._do(island, effect)
        if (wake := machine.wake_at) is not None:
            self._later(wake - self.now, lambda: self._wake_learner(island, machine, wake))

    def _wake_learner(self, island: Island, machine: Learner, wake: float) -> None:
        if island.machine is machine and machine.wake_at == wake:
            self._hear(island, fx.Tick())

    def _do(self, island: Island, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(message):
                self._say(island, message)
            case fx.Read(round=number):
                if not self.settings.synchronous:
                    island.reads.clear()
                island.reads[number] = effect
                self._soon(island)
            case fx.Hold(number, step):
                island.holds[number] = step
                self._soon(island)
            case fx.LetGo(number):
                island.holds.pop(number, None)
                self._soon(island)
            case fx.Fetch(fragment, _):
                self._fetch(island, fragment)
            case fx.Adopt():
                island.inbox.append((effect, island.fetched[effect.fragment]))
                self._soon(island)
            case fx.Own():
                island.adopted = [0] * island.fragments
                self._soon(island)
            case fx.Forget(reset=reset):
                island.forget(reset)
                self._soon(island)
            case fx.Save(cut):
                if island.saves:
                    self._later(self._delay(), lambda: self._hear(island, fx.Saved(cut, island.t, "file", "digest")))
            case fx.Supply() | fx.HangUp():
                pass
            case fx.Await():
                island.waits = True
            case fx.Begin():
                island.waits = False
                self._soon(island)
            case fx.Capture(number):
                island.capture = number
                self._soon(island)
            case fx.Give(number, ticket):
                island.given[number].tickets.add(ticket)
            case fx.PassOn(ticket):
                self._later(island.stream_s + self._delay(2.0), lambda: self._stream_arrives(ticket))
            case fx.TakeBack(ticket):
                for given in island.given.values():
                    given.tickets.discard(ticket)
            case fx.Dispose(number):
                island.given.pop(number, None)
            case fx.FetchState(ticket, direct=direct):
                self._fetch_state(island, ticket, direct)
            case fx.LeaveState():
                island.fetching = ""
            case fx.TakeState():
                self._soon(island)
            case fx.UploadAll():
                self._upload_all(island)
            case fx.Upload(number, attempt, fragment):
                self._upload(island, number, attempt, fragment)
            case fx.Drop(fragment, t):
                if (copy := island.copies.get((fragment, t))) is not None and not copy.sent:
                    del island.copies[fragment, t]
            case fx.Inform(progress, _):
                island.informed.append(progress)
            case fx.Stop(final=final, failed=failed):
                self._later(0.0 if final else self.courier_s, lambda: self._stop(island, final, failed))
            case fx.Note():
                self.notes.append((self.now, effect))

    def _stop(self, island: Island, final: bool, failed: bool) -> None:
        island.done, island.over, island.failed = True, island.over or final, failed
        island.holds.clear()
        self._soon(island)

    def _fetch(self, island: Island, fragment: int) -> None:
        channel, machine = island.channel, island.machine

        def arrive() -> None:
            if island.machine is not machine:
                return
            if island.linked and island.channel == channel:
                island.fetched[fragment] = self.theta[fragment]
                self._hear(island, fx.Fetched(fragment, self.syncer.versions[fragment]))
            else:
                self._hear(island, fx.FetchFailed(fragment, "unreachable"))

        self._later(self._delay(2.0), arrive)

    def _say(self, island: Island, message: FromLearner) -> None:
        if island.silent:
            return
        name = island.machine.name
        event: fx.SyncerEvent = fx.Received(name, message)
        if isinstance(message, Contribution):
            event = fx.Delivered(name, message, "3 of 4 values are not finite" if island.broken else None)
        self._on_channel(island, "up", lambda: self._tell(event))

    def _upload_all(self, island: Island) -> None:
        def arrive() -> None:
            self.theta = list(island.base)
            self._tell(fx.Initialised(island.machine.name))

        if island.answers:
            self._on_channel(island, "body", arrive)
        else:
            self._on_channel(island, "body", lambda: self._later(1.0, lambda: self._upload_all(island)))

    def _upload(self, island: Island, number: int, attempt: int, fragment: int) -> None:
        if not island.answers:
            return
        copy = max((c for (f, _), c in island.copies.items() if f == fragment), key=lambda c: c.fact.t)
        copy.sent = True
        name, delta = island.machine.name, copy.base - copy.value

        def arrive() -> None:
            self.bodies[name, number, attempt] = delta
            self._hear(island, fx.Uploaded(number, attempt, "digest"))

        self._on_channel(island, f"body {number}", arrive)

    # ---- helping ------------------------------------------------------------------------------------------------

    def _fetch_state(self, island: Island, ticket: str, direct: str) -> None:
        island.fetching, island.arrived = ticket, None
        if direct:
            stream_s = self.islands[direct].stream_s
            self._later(stream_s + self._delay(2.0), lambda: self._stream_arrives(ticket))
        elif (wrong := self.syncer.peers.wrong_newcomer(ticket, island.machine.name)) is not None:
            self._later(0.0, lambda: self._hear(island, fx.StateFailed(ticket, wrong)))
        else:
            self._on_channel(island, "relay", lambda: self._tell(fx.RelayWanted(ticket, 0)))

    def _stream_arrives(self, ticket: str) -> None:
        """Whole, if its giver is still there and the newcomer still wants it."""
        alive = [island for island in self.islands.values() if island.alive]
        given = [one for island in alive for one in island.given.values() if ticket in one.tickets]
        for island in [one for one in alive if one.fetching == ticket]:
            if given:
                island.arrived = given[0]
                self._hear(island, fx.StateCame(ticket))
            else:
                island.fetching = ""
                self._hear(island, fx.StateFailed(ticket, "the connection broke"))

    def _serve(self, island: Island) -> None:
        """Between two steps: copy its state for a newcomer, take a peer's."""
        if (number := island.capture) > 0:
            island.capture = 0
            made = Given(island, island.moments, island.t, list(island.adopted))
            machine, direct = island.machine, island.machine.name if self.direct else ""
            fact = fx.Captured(number, island.t, island.state_bytes, "digest", direct)
            self._later(self._delay(), lambda: island.machine is machine and self._copied_state(island, made, fact))
        if (arrived := island.arrived) is not None and island.fetching:
            ticket, island.fetching, island.arrived = island.fetching, "", None
            if island.fits:
                island.moments, island.source = arrived.moments, arrived.giver.machine.name
            reason = "" if island.fits else "'optimizer' is SGD here, AdamW in the snapshot"
            self._hear(island, fx.Taken(ticket, island.t, reason))

    def _copied_state(self, island: Island, made: Given, fact: fx.Captured) -> None:
        island.given[fact.number] = made
        self._hear(island, fact)

    # ---- training -----------------------------------------------------------------------------------------------

    def _soon(self, island: Island) -> None:
        """Orders take effect once all effects of an event are carried out."""
        self._later(0.0, lambda: self._if_idle(island))

    def _if_idle(self, island: Island) -> None:
        """A learner that waits (at a hold, before its first step, after its last) serves at once."""
        if not island.alive or island.paused:
            return
        if not island.training or island.stopped:
            self._serve(island)
            self._adopt_arrived(island)
            self._make_copies(island)
            self._begin(island)
        elif island.blocked:
            self._serve(island)
            self._adopt_arrived(island)
            if not island.holding():
                self._go_on(island)

    def _begin(self, island: Island) -> None:
        if not island.training and min(island.adopted) >= 0 and not island.waits:
            island.training = True
            island.history.append(tuple(island.theta))
            if not self._stop_if_done(island):
                self._later(island.step_s, lambda: self._train(island))
        elif not island.training and island.done and not island.stopped:
            self._stop_if_done(island)

    def _train(self, island: Island) -> None:
        if not island.alive or island.stopped or island.paused or island.blocked:
            return
        island.t += 1
        island.moments += 1
        island.tokens_total += island.tokens_per_step
        for fragment in range(island.fragments):
            island.theta[fragment] -= island.gradient(island.t)
            island.steps[fragment] += 1
            island.tokens[fragment] += island.tokens_per_step
        self._serve(island)
        self._adopt_arrived(island)
        self._make_copies(island)
        self._hear(island, self._stepped(island))
        self._adopt_arrived(island)
        if island.holding() and not island.done:
            island.blocked = True
        else:
            self._go_on(island)

    def _go_on(self, island: Island) -> None:
        island.blocked = False
        island.history.append(tuple(island.theta))
        if not self._stop_if_done(island):
            self._later(island.step_s, lambda: self._train(island))

    def _stop_if_done(self, island: Island) -> bool:
        if island.done and not island.stopped:
            island.stopped = True
            self._hear(island, self._stepped(island))
            self._soon(island)
        return island.stopped

    def _stepped(self, island: Island) -> fx.Stepped:
        return fx.Stepped(
            t=island.t,
            steps=tuple(island.steps),
            tokens=tuple(island.tokens),
            tokens_total=island.tokens_total,
            stopped=island.stopped,
            dropped=tuple(island.dropped),
        )

    def _make_copies(self, island: Island) -> None:
        for number, read in sorted(island.reads.items()):
            if (island.t >= read.step or island.stopped) and island.reads.get(number) is read:
                del island.reads[number]
                f = read.fragment
                counters = (island.t, island.steps[f], island.tokens[f], island.adopted[f], island.tokens_total)
                fact = fx.Copied(number, f, *counters)
                island.copies[f, island.t] = Copy(island.theta[f], island.base[f], fact)
                self._hear(island, fact)

    def _adopt_arrived(self, island: Island) -> None:
        for entry in list(island.inbox):
            adopt, value = entry
            held = island.blocked and island.holding(adopt.fragment)
            if (adopt.step <= island.t or island.stopped or held) and entry in island.inbox:
                island.inbox.remove(entry)
                self._adopt(island, adopt, value)

    def _adopt(self, island: Island, adopt: fx.Adopt, value: float) -> None:
        f, own = adopt.fragment, island.theta[adopt.fragment]
        steps = tokens = 0
        copy = island.copies.get((f, adopt.copy_t)) if adopt.copy_t is not None else None
        if adopt.rule == "blend":
            island.theta[f] = self.settings.blend * own + (1 - self.settings.blend) * value
        elif adopt.rule == "carry" and (copy is not None or adopt.copy_t is None):
            island.theta[f] = value + own - (copy.value if copy else island.base[f])
            steps = island.steps[f] - (copy.fact.steps if copy else 0)
            tokens = island.tokens[f] - (copy.fact.tokens if copy else 0)
        else:
            island.theta[f] = value
        island.dropped[f] += island.tokens[f] - adopt.held_tokens - tokens
        assert island.dropped[f] >= 0, "more was said to be merged than was there"
        island.base[f], island.adopted[f] = value, adopt.version
        island.steps[f], island.tokens[f] = steps, tokens
        island.adoptions.append((island.t, f, adopt.version))
        for key in [key for key in island.copies if key[0] == f and key[1] < island.t]:
            del island.copies[key]
        for number in [n for n in island.holds if n % island.fragments == f and n <= adopt.round]:
            del island.holds[number]
        self._hear(island, fx.Adopted(f, adopt.version, island.t, steps, tokens, island.dropped[f]))
