"""A training process with one number per fragment: steps, copies, adoptions, in the order of the real boundary.

Between two steps: serve newcomers, adopt what has arrived, make the copies that are due, tell the courier; then, in
synchronous runs, wait. In an asynchronous run nothing here ever waits: a step takes `step_s`, whatever else happens.

Leased samples are taken in the order granted, each once, and counted when their step is done. When leases run out
because the syncer is out of reach, the last one is gone through again: counted, not leased.

A process that was asked to leave stops, waits for its last steps to be merged, and goes. It waits as long as the real
one does (a test compares the constants). Once the run ends it leaves with everybody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Range
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import after_adoption
from atoll.simulate.virtual_time import EventQueue

FIRST_LEASE_S = 30.0
"""How long it waits for its first lease before it goes on with data of its own."""
DRAIN_S = 10.0
"""How long the last steps may take to be merged, where a machine is taken away."""
CYCLES = 2
"""So many cycles they may take where nobody hurries."""


class TrainingWorld(Protocol):
    """What a training process needs of the world around it."""

    settings: Settings
    queue: EventQueue
    events: int
    start_theta: float

    @property
    def now(self) -> float: ...

    @property
    def longest_h(self) -> int: ...

    def step_s(self, learner: Training) -> float: ...

    def on_step(self, learner: Training) -> None: ...

    def on_block(self, learner: Training) -> None: ...

    def on_adoption(self, learner: Training, adopt: fx.Adopt, value: float, dropped: int) -> None: ...


class Leased:
    """The samples that a training process was leased."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.position = 0
        """Leased samples whose steps are done."""
        self.over = False
        self._ranges: deque[Range] = deque()
        self.newest = -1
        self._at = 0
        """Samples of the first range that are taken."""
        self._began = False

    @property
    def ready(self) -> bool:
        """Whether a batch can be had: a new one, an old one once more, or none ever again."""
        return bool(self._ranges) or self._began or self.over

    @property
    def used_up(self) -> bool:
        return self.over and not self._ranges

    def supply(self, ranges: Sequence[Range], over: bool) -> None:
        for one in ranges:
            if one.lease > self.newest:
                self.newest = one.lease
                self._ranges.append(one)
        self.over = self.over or over

    def take(self) -> None:
        """The samples of one step."""
        wanted = self.batch
        self._began = True
        while wanted and self._ranges:
            first = self._ranges[0]
            taken = min(wanted, first.stop - first.start - self._at)
            self._at += taken
            self.position += taken
            wanted -= taken
            if self._at == first.stop - first.start:
                self._ranges.popleft()
                self._at = 0

    def forget(self) -> None:
        """Another life: what it was leased goes to whoever gets it next."""
        self._ranges.clear()
        self.newest = -1
        self._at = self.position = 0
        self.over = False


@dataclass(slots=True)
class Leaving:
    """A request to leave, and how far it is."""

    why: str = ""
    """Empty: nobody asked."""
    hurried: bool = False
    waits_s: float = 0.0
    until: float = inf
    """When it goes, whatever it has left."""
    run_ends: bool = False
    """Then everybody waits for the end."""
    left: bool = False
    returns: bool = True
    """Whether another process takes its place afterwards."""
    saved: bool = False
    """And goes on with its inner optimizer."""
    then: Callable[[], object] = lambda: None

    def ask(self, why: str, *, hurried: bool) -> None:
        self.why, self.hurried = why, hurried

    def begin(self, now: float, one: Training) -> float:
        """Its loop has ended. How long it waits from here."""
        cycle_s = one.world.longest_h * one.step_s
        self.waits_s = DRAIN_S if self.hurried else max(DRAIN_S, CYCLES * cycle_s)
        self.until = now + self.waits_s
        return self.waits_s

    def is_due(self, now: float, one: Training) -> bool:
        """Whether it goes now."""
        return bool(self.why) and not self.run_ends and (now >= self.until or not any(one.steps))


@dataclass(slots=True)
class Copy:
    value: float
    base: float
    fact: fx.Copied
    sent: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """A contribution as its learner made it."""

    session: str
    incarnation: int
    copy: fx.Copied
    delta: float
    plain: bool
    """Its model never blended: its Δ is the sum of its own steps, which are all of one size."""


class Training:
    """What lives in the training process and in the memory it shares with its courier."""

    def __init__(self, world: TrainingWorld, name: str, step_s: float, gradient: Callable[[int], float]) -> None:
        self.world, self.name, self.step_s, self.gradient = world, name, step_s, gradient
        self.fragments = world.settings.fragments
        self.tokens_per_step = 10
        self.alive = True
        self.paused = False
        """It makes no steps; its courier lives."""
        self.frozen = False
        """The whole host stands still, its courier too."""
        self.training = self.blocked = False
        self.done = self.stopped = self.over = self.failed = False
        """Told to stop; stopped; told that nothing more will be asked of it; ended by a refusal."""
        self.leaving = Leaving()
        self.waits = False
        """A peer's state is on its way."""
        self.held_back = False
        """Whether the first step waits, because others of the first roster still fetch version 0."""
        self.broken = False
        """Its contributions fail screening, until its inner optimizer starts afresh."""
        self.plain = True
        """Its model never blended a version with values of its own."""
        self.t = 0
        self.tokens_total = 0
        self.life = 0
        """Incarnation that its counters belong to: it may lag behind the courier's."""
        self.moments = 0
        """Stands for the inner optimizer's state: the steps that went into it."""
        self.set_first_weights(world.start_theta)
        self.adopted = [-1] * self.fragments
        self.steps: list[int] = []
        self.tokens: list[int] = []
        self.dropped: list[int] = []
        self.missed: list[int] = []
        self._zero()
        self.leased: Leased | None = None
        self.reads: dict[int, fx.Read] = {}
        self.holds: dict[int, int] = {}
        self.inbox: list[tuple[fx.Adopt, float]] = []
        self.copies: dict[tuple[int, int], Copy] = {}
        self.history: list[tuple[float, ...]] = []
        """What the model was after every step; only where a world keeps it."""
        self.adoptions: list[tuple[int, int, int]] = []
        """(t, fragment, version), likewise."""
        self.born_at = world.queue.now
        self.stepped_at = -1.0
        """When the last step ended, if the next follows on it without a stop between."""
        self._turn = 0
        """Which of the steps that were set going is the present one: others are out of date."""
        self._is_soon = False

    def set_first_weights(self, value: float) -> None:
        self.theta = [value] * self.fragments
        self.base = list(self.theta)

    def _zero(self) -> None:
        self.steps, self.tokens = [0] * self.fragments, [0] * self.fragments
        self.dropped = [0] * self.fragments
        self.missed = [0] * self.fragments

    def handle_event(self, event: fx.LearnerEvent) -> object:
        """The courier is told."""
        raise NotImplementedError

    def serve(self) -> None:
        """Between two steps: copy its state for a newcomer, take a peer's."""
        raise NotImplementedError

    def forget(self, reset: bool) -> None:
        """Another life: no version, no counters, no leased data."""
        self._zero()
        self.adopted = [-1] * self.fragments
        if reset:
            self.broken, self.moments = False, 0
        if self.leased is not None:
            self.leased.forget()
        self.inbox, self.reads, self.holds = [], {}, {}

    def drop_orders(self) -> None:
        """The courier that gave them is dead."""
        self.reads, self.holds, self.inbox = {}, {}, []

    def holding(self, fragment: int | None = None) -> bool:
        return any(
            step <= self.t and fragment in (None, number % self.fragments) for number, step in self.holds.items()
        )

    # ---- the loop -----------------------------------------------------------------------------------------------

    def wake_soon(self) -> None:
        """Orders take effect once all effects of an event are carried out."""
        if not self._is_soon and (not self.training or self.stopped or self.blocked):
            self._is_soon = True
            self.world.queue.call_later(0.0, self.if_idle)

    def if_idle(self) -> object:
        """A learner that waits (at a hold, before its first step, after its last) serves at once."""
        self._is_soon = False
        if not self.alive or self.stands_still():
            return False
        if not self.training or self.stopped:
            self.listen(stepped=False)
            self.serve()
            self.adopt_arrived()
            self.make_copies()
            self._begin()
        elif self.blocked:
            self.listen(stepped=False)
            self.serve()
            self.adopt_arrived()
            self.make_copies()
            if not self.holding() or self.leaving.why:
                self._go_on()
        else:
            return False
        if self.stopped and self.leaving.is_due(self.world.now, self):
            self.leave_now()
        return None

    def _begin(self) -> None:
        if self.training:
            return
        if min(self.adopted) >= 0 and not self.waits and not self.held_back and self._has_data():
            self.training = True
            self.world.on_step(self)
            if not self._stop_if_done():
                self._set_going()
        elif (self.done or self.leaving.why) and not self.stopped:
            self._stop_if_done()

    def _has_data(self) -> bool:
        if self.leased is None or self.leased.ready:
            return True
        left = self.born_at + FIRST_LEASE_S - self.world.queue.now
        if left <= 0:
            self.leased = None
            return True
        self.world.queue.call_later(left, self.wake_soon)
        return False

    def _set_going(self) -> None:
        self._turn += 1
        self.stepped_at = self.world.queue.now
        self.world.queue.call_later(self.world.step_s(self), self._train, self._turn)

    def _train(self, turn: int) -> object:
        if turn != self._turn or not self.alive or self.stopped or self.stands_still() or self.blocked:
            return False
        world = self.world
        world.events += 1
        self.t += 1
        self.moments += 1
        self.count_step()
        if self.leased is not None:
            self.leased.take()
            self.done = self.done or self.leased.used_up
        self.listen(stepped=True)
        self.serve()
        self.adopt_arrived()
        self.make_copies()
        self.handle_event(self.stepped_event())
        self.adopt_arrived()
        if self.holding() and not self.done and not self.leaving.why:
            self.blocked = True
            world.on_block(self)
            self.wake_soon()
        else:
            self._go_on()
        return None

    def count_step(self) -> None:
        self.tokens_total += self.tokens_per_step
        down, tokens = self.gradient(self.t), self.tokens_per_step
        self.theta = [value - down for value in self.theta]
        self.steps = [count + 1 for count in self.steps]
        self.tokens = [count + tokens for count in self.tokens]

    def listen(self, *, stepped: bool) -> None:
        """Take what the courier orders. Here that has taken effect when it came."""

    def stands_still(self) -> bool:
        return self.paused or self.frozen

    def _go_on(self) -> None:
        self.blocked = False
        self.world.on_step(self)
        if not self._stop_if_done():
            self._set_going()

    def go_on_after_a_pause(self) -> None:
        self.wake_soon()
        if self.training and not self.stopped and not self.blocked:
            self._set_going()

    def _stop_if_done(self) -> bool:
        if (self.done or self.leaving.why) and not self.stopped:
            self.stopped = True
            self._wait_to_go()
            self.handle_event(self.stepped_event())
            self.wake_soon()
        return self.stopped

    def leave(self, why: str, *, hurried: bool = False) -> object:
        """It is asked to leave: at the next boundary its loop ends."""
        if not self.alive or self.leaving.why:
            return False
        self.leaving.ask(why, hurried=hurried)
        if self.stopped:
            self._wait_to_go()
        self.wake_soon()
        return None

    def _wait_to_go(self) -> None:
        if self.leaving.why:
            self.world.queue.call_later(self.leaving.begin(self.world.now, self), self.if_idle)

    def leave_now(self) -> None:
        """It has given what it could, and leaves."""
        raise NotImplementedError

    def stop(self, final: bool, failed: bool) -> object:
        if not self.alive:
            return False
        self.done, self.over, self.failed = True, self.over or final, failed
        self.leaving.run_ends = True
        self.holds.clear()
        self.wake_soon()
        return None

    def stepped_event(self) -> fx.Stepped:
        return fx.Stepped(
            t=self.t,
            steps=tuple(self.steps),
            tokens=tuple(self.tokens),
            tokens_total=self.tokens_total,
            stopped=self.stopped,
            dropped=tuple(self.dropped),
            missed=tuple(self.missed),
            position=self.leased.position if self.leased is not None else -1,
            leaving=bool(self.leaving.why),
        )

    # ---- copies and adoptions -----------------------------------------------------------------------------------

    def make_copies(self) -> None:
        if not self.reads:
            return
        for number, read in sorted(self.reads.items()):
            if (self.t >= read.step or self.stopped) and self.reads.get(number) is read:
                del self.reads[number]
                self._copy(number, read.fragment)

    def _copy(self, number: int, f: int) -> None:
        position = self.leased.position if self.leased is not None else -1
        counters = (self.t, self.steps[f], self.tokens[f], self.adopted[f], self.tokens_total, position)
        fact = fx.Copied(number, f, *counters)
        self.copies[f, self.t] = Copy(self.theta[f], self.base[f], fact)
        self.handle_event(fact)

    def adopt_arrived(self) -> None:
        if not self.inbox:
            return
        for entry in list(self.inbox):
            adopt, value = entry
            held = self.blocked and self.holding(adopt.fragment)
            if (adopt.step <= self.t or self.stopped or held) and entry in self.inbox:
                self.inbox.remove(entry)
                self._adopt(adopt, value)

    def _adopt(self, adopt: fx.Adopt, value: float) -> None:
        f, own = adopt.fragment, self.theta[adopt.fragment]
        steps = tokens = 0
        copy = self.copies.get((f, adopt.copy_t)) if adopt.copy_t is not None else None
        if adopt.rule == "blend":
            blend = self.world.settings.blend
            self.theta[f] = blend * own + (1 - blend) * value
            self.plain = False
        elif adopt.rule == "carry" and (copy is not None or adopt.copy_t is None):
            self.theta[f] = value + own - (copy.value if copy else self.base[f])
            steps = self.steps[f] - (copy.fact.steps if copy else 0)
            tokens = self.tokens[f] - (copy.fact.tokens if copy else 0)
        else:
            self.theta[f] = value
        counters = (self.dropped[f], self.missed[f])
        dropped, missed = after_adoption(self.tokens[f], adopt.held_tokens, tokens, *counters)
        self.world.on_adoption(self, adopt, value, dropped)
        self.dropped[f], self.missed[f] = dropped, missed
        self.base[f], self.adopted[f] = value, adopt.version
        self.steps[f], self.tokens[f] = steps, tokens
        for key in [key for key, made in self.copies.items() if key[0] == f and made.fact.base < adopt.version]:
            del self.copies[key]  # it was made on another base
        for number in [n for n in self.holds if n % self.fragments == f and n <= adopt.round]:
            del self.holds[number]
        self.handle_event(fx.Adopted(f, adopt.version, self.t, steps, tokens, dropped, missed))
