"""A small world of virtual time for the two state machines: real rules, one number per fragment instead of tensors.

Training follows the boundary order of the real training process: adopt what has arrived, make the copies that are due,
then (synchronous runs) wait. Messages and bodies take `latency_s`; nothing else takes time but the learners' steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.protocol import effects as fx
from atoll.protocol.errors import AtollError
from atoll.protocol.learner import Learner
from atoll.protocol.messages import FromLearner, FromSyncer, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import Syncer

TENSORS = (TensorSpec("w", (1,), "float32"),)


@dataclass
class Copy:
    value: float
    base: float
    fact: fx.Copied


@dataclass
class Island:
    """A learner with its training process."""

    machine: Learner
    fragments: int
    step_s: float
    tokens_per_step: int
    theta: list[float]
    gradient: Callable[[int], float]
    alive: bool = True
    linked: bool = False
    answers: bool = True
    """False: it reports but its bodies never arrive."""
    broken: bool = False
    """True: its contributions fail screening."""
    t: int = 0
    tokens_total: int = 0
    stopped: bool = False
    done: bool = False
    blocked: bool = False
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    reads: dict[int, fx.Read] = field(default_factory=dict)
    holds: dict[int, int] = field(default_factory=dict)
    inbox: list[tuple[fx.Adopt, float]] = field(default_factory=list)
    copies: dict[tuple[int, int], Copy] = field(default_factory=dict)
    history: list[tuple[float, ...]] = field(default_factory=list)
    longest_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.steps, self.tokens = [0] * self.fragments, [0] * self.fragments
        self.base, self.adopted = list(self.theta), [-1] * self.fragments


class World:
    def __init__(
        self,
        learners: int = 3,
        *,
        step_s: float | list[float] = 1.0,
        latency_s: float = 0.0,
        outer_lr: float = 1.0,
        theta: float = 1.0,
        gradient: Callable[[int], float] = lambda t: 1.0,
        **settings: Any,
    ) -> None:
        settings.setdefault("fragments", 2)
        self.settings = Settings(learners=learners, **settings).resolved(1000)
        self.syncer = Syncer(self.settings, run="run", fingerprint="plan")
        self.now, self.latency_s, self.outer_lr = 0.0, latency_s, outer_lr
        self.gradient = gradient
        self.start_theta = theta
        self.theta = [theta] * self.settings.fragments
        self.staged: dict[int, float] = {}
        self.bodies: dict[tuple[str, int, int], float] = {}
        self.notes: list[tuple[float, fx.Note]] = []
        self.log: list[tuple[float, fx.SyncerEffect]] = []
        self.finished = False
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sessions = itertools.count()
        self.islands: dict[str, Island] = {}
        speeds = step_s if isinstance(step_s, list) else [step_s] * learners
        for index in range(learners):
            self.join(f"learner-{index}", step_s=speeds[index])

    # ---- what a test does to it ---------------------------------------------------------------------------------

    def join(self, name: str, step_s: float = 1.0) -> Island:
        machine = Learner(name, f"session-{next(self._sessions)}", TENSORS)
        theta = [self.start_theta] * self.settings.fragments
        island = Island(machine, self.settings.fragments, step_s, 10, theta, self.gradient)
        self.islands[name] = island
        self.link(name)
        return island

    def link(self, name: str) -> None:
        island = self.islands[name]
        island.linked = True
        self._tell(fx.Greeted(island.machine.hello()))

    def kill(self, name: str) -> None:
        self.islands[name].alive = False
        self.unlink(name, "killed")

    def unlink(self, name: str, reason: str = "connection reset") -> None:
        island = self.islands[name]
        if island.linked:
            island.linked = False
            self._tell(fx.Lost(name, reason))
            if island.alive:
                self._hear(island, fx.Cut(reason))

    def run_until(self, *, round: int | None = None, seconds: float | None = None) -> World:
        limit = self.now + (seconds if seconds is not None else 100_000.0)
        while self._queue and not self.finished:
            if round is not None and self.syncer.committed >= round:
                return self
            if self._queue[0][0] > limit:
                break
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if seconds is not None:
            self.now = max(self.now, limit)
        elif round is not None and self.syncer.committed < round:
            raise AssertionError(f"the world came to rest in round {self.syncer.committed}:\n{self.story()}")
        return self

    def run_to_end(self) -> World:
        self.run_until(seconds=100_000)
        assert self.finished, self.story()
        return self

    # ---- what a test looks at -----------------------------------------------------------------------------------

    def said(self, kind: str) -> list[fx.Note]:
        return [note for _, note in self.notes if note.kind == kind]

    def round_note(self, number: int) -> dict[str, Any]:
        return next(note.data for note in self.said("round") if note.data["round"] == number)

    def members(self, number: int) -> set[str]:
        return {member["learner"] for member in self.round_note(number)["members"]}

    def story(self) -> str:
        return "\n".join(f"{at:8.3f} {note.text}" for at, note in self.notes[-40:])

    # ---- the syncer's side --------------------------------------------------------------------------------------

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def _tell(self, event: fx.SyncerEvent) -> None:
        for effect in self.syncer.handle(self.now, event):
            self.log.append((self.now, effect))
            self._carry_out(effect)
        if (wake := self.syncer.wake_at) is not None:
            self._later(max(0.0, wake - self.now), lambda: self._wake_syncer(wake))

    def _wake_syncer(self, wake: float) -> None:
        if self.syncer.wake_at == wake:
            self._tell(fx.Tick())

    def _carry_out(self, effect: fx.SyncerEffect) -> None:
        match effect:
            case fx.Send(learner, message):
                self._deliver(learner, message)
            case fx.Merge():
                self._merge(effect)
            case fx.Commit(_, fragment, _):
                self.theta[fragment] = self.staged.pop(fragment)
            case fx.Discard(learner, number, attempt):
                self.bodies.pop((learner, number, attempt), None)
            case fx.Expel(learner, reason):
                island = self.islands[learner]
                island.linked = False
                if island.alive:
                    self._later(self.latency_s, lambda: self._hear(island, fx.Cut(reason)))
            case fx.Finished():
                self._later(10 * self.latency_s + 1.0, self._finish)
            case fx.Note():
                self.notes.append((self.now, effect))

    def _finish(self) -> None:
        self.finished = True

    def _merge(self, merge: fx.Merge) -> None:
        total = sum(part.weight for part in merge.parts)
        deltas = [part.weight * self.bodies[part.learner, merge.round, part.attempt] for part in merge.parts]
        self.staged[merge.fragment] = self.theta[merge.fragment] - self.outer_lr * sum(deltas) / total
        self._later(0.0, lambda: self._tell(fx.Merged(merge.round, "digest")))

    def _deliver(self, name: str, message: FromSyncer) -> None:
        island = self.islands[name]
        if island.linked and island.alive:
            self._later(self.latency_s, lambda: island.alive and self._hear(island, fx.Arrived(message)))

    # ---- the learners' side -------------------------------------------------------------------------------------

    def _hear(self, island: Island, event: fx.LearnerEvent) -> None:
        if not island.alive:
            return
        for effect in island.machine.handle(self.now, event):
            self._do(island, effect)
        if (wake := island.machine.wake_at) is not None:
            self._later(max(0.0, wake - self.now), lambda: self._wake_learner(island, wake))

    def _wake_learner(self, island: Island, wake: float) -> None:
        if island.alive and island.machine.wake_at == wake:
            self._hear(island, fx.Tick())

    def _do(self, island: Island, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(message):
                self._say(island, message)
            case fx.Read(round=number):
                island.reads[number] = effect
                self._if_idle(island)
            case fx.Hold(number, step):
                island.holds[number] = step
            case fx.LetGo(number):
                island.holds.pop(number, None)
                self._if_idle(island)
            case fx.Fetch(fragment, _):
                self._fetch(island, fragment)
            case fx.Adopt():
                value = effect.__dict__ if False else self._fetched[island.machine.session, effect.fragment]
                island.inbox.append((effect, value))
                self._if_idle(island)
            case fx.Own():
                island.adopted = [0] * island.fragments
                self._begin(island)
            case fx.Forget():
                island.adopted = [-1] * island.fragments
                island.broken = island.broken and not effect.reset
                island.inbox.clear()
            case fx.UploadAll():
                self.theta = list(island.base)
                self._later(self.latency_s, lambda: self._tell(fx.Initialised(island.machine.name)))
            case fx.Upload(number, attempt, fragment):
                self._upload(island, number, attempt, fragment)
            case fx.Stop(final=final):
                island.done = True
                island.holds.clear()
                island.stopped = island.stopped or final
                self._if_idle(island)
            case fx.Note():
                self.notes.append((self.now, effect))

    _fetched: dict[tuple[str, int], float] = {}

    def _fetch(self, island: Island, fragment: int) -> None:
        def arrive() -> None:
            if island.linked:
                self._fetched[island.machine.session, fragment] = self.theta[fragment]
                self._hear(island, fx.Fetched(fragment, self.syncer.versions[fragment]))
            else:
                self._hear(island, fx.FetchFailed(fragment, "unreachable"))

        self._later(2 * self.latency_s, arrive)

    def _say(self, island: Island, message: FromLearner) -> None:
        name = island.machine.name
        event: fx.SyncerEvent = fx.Received(name, message)
        if type(message).__name__ == "Contribution":
            refusal = "3 of 4 values are not finite" if island.broken else None
            event = fx.Delivered(name, message, refusal)  # type: ignore[arg-type]
        self._later(self.latency_s, lambda: island.linked and self._tell(event))

    def _upload(self, island: Island, number: int, attempt: int, fragment: int) -> None:
        if not island.answers:
            return
        copies = [copy for (f, _), copy in island.copies.items() if f == fragment]
        copy = max(copies, key=lambda c: c.fact.t)
        self.bodies[island.machine.name, number, attempt] = copy.base - copy.value
        self._later(self.latency_s, lambda: self._hear(island, fx.Uploaded(number, attempt, "digest")))

    # ---- training -----------------------------------------------------------------------------------------------

    def _begin(self, island: Island) -> None:
        if not island.history and min(island.adopted) >= 0:
            island.history.append(tuple(island.theta))
            self._later(island.step_s, lambda: self._train(island))

    def _train(self, island: Island) -> None:
        if not island.alive or island.stopped:
            return
        island.t += 1
        island.tokens_total += island.tokens_per_step
        for fragment in range(island.fragments):
            island.theta[fragment] -= island.gradient(island.t)
            island.steps[fragment] += 1
            island.tokens[fragment] += island.tokens_per_step
        self._boundary(island)

    def _boundary(self, island: Island) -> None:
        self._adopt_arrived(island)
        self._make_copies(island)
        island.stopped = island.stopped or island.done
        self._hear(island, self._stepped(island))
        self._adopt_arrived(island)
        if any(step <= island.t for step in island.holds.values()) and not island.done:
            island.blocked = True
            return
        self._go_on(island)

    def _go_on(self, island: Island) -> None:
        island.blocked = False
        island.history.append(tuple(island.theta))
        if not island.stopped:
            self._later(island.step_s, lambda: self._train(island))

    def _if_idle(self, island: Island) -> None:
        """A learner that waits (at a hold, before its first step, after its last) serves at once."""
        if not island.history or island.stopped:
            self._adopt_arrived(island)
            self._make_copies(island)
            self._begin(island)
        elif island.blocked:
            self._adopt_arrived(island)
            if island.done or not any(step <= island.t for step in island.holds.values()):
                if island.done:
                    island.stopped = True
                    self._hear(island, self._stepped(island))
                self._go_on(island)

    def _stepped(self, island: Island) -> fx.Stepped:
        return fx.Stepped(
            t=island.t,
            steps=tuple(island.steps),
            tokens=tuple(island.tokens),
            tokens_total=island.tokens_total,
            stopped=island.stopped,
        )

    def _make_copies(self, island: Island) -> None:
        for number, read in sorted(island.reads.items()):
            if island.t >= read.step or island.stopped:
                del island.reads[number]
                f = read.fragment
                fact = fx.Copied(number, f, island.t, island.steps[f], island.tokens[f], island.adopted[f])
                island.copies[f, island.t] = Copy(island.theta[f], island.base[f], fact)
                self._hear(island, fact)

    def _adopt_arrived(self, island: Island) -> None:
        for adopt, value in [entry for entry in island.inbox if entry[0].step <= island.t or island.stopped]:
            island.inbox.remove((adopt, value))
            self._adopt(island, adopt, value)

    def _adopt(self, island: Island, adopt: fx.Adopt, value: float) -> None:
        f, own = adopt.fragment, island.theta[adopt.fragment]
        steps = tokens = 0
        if adopt.rule == "overwrite":
            island.theta[f] = value
        elif adopt.rule == "blend":
            island.theta[f] = self.settings.blend * own + (1 - self.settings.blend) * value
        else:
            copy = island.copies.get((f, adopt.copy_t)) if adopt.copy_t is not None else None
            island.theta[f] = value + own - (copy.value if copy else island.base[f])
            steps = island.steps[f] - (copy.fact.steps if copy else 0)
            tokens = island.tokens[f] - (copy.fact.tokens if copy else 0)
        island.base[f], island.adopted[f] = value, adopt.version
        island.steps[f], island.tokens[f] = steps, tokens
        for number in [n for n in island.holds if n % island.fragments == f and n <= adopt.round]:
            del island.holds[number]
        self._hear(island, fx.Adopted(f, adopt.version, island.t, steps, tokens))
        if not isinstance(adopt, AtollError) and not island.history:
            self._begin(island)
