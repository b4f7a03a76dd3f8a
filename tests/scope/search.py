"""Small-scope search: every order in which things can happen, to a stated depth, over the shipped machines.

A scope is a few learners, two fragments, a few faults and a place in a run where the search begins. From there it
tries all choices of world.py, checks the rules of checks.py on every way, and enters every state once; what
counts as the same state says form.py, and clock values do not. Two ways to go:

- wide: all interleavings, breadth first, to a depth. The first violation found is one of the shortest;
- deep: long runs that depart from the usual order (calm.py) a few times, anywhere; a fault is a departure too.
  All runs of so many choices with one departure come before those with two. A violation is one of the fewest.

It has found no bug that the fault simulator (`atoll simulate faults`) had not found before; planted bugs it finds too.
So it is a test and no command.

Now and then the search stops the faults and lets a state go on calmly: rounds must go on, and everyone become current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.scope.calm import calmly, goes_on, usual
from tests.scope.checks import Broken
from tests.scope.form import form
from tests.scope.turn import take
from tests.scope.world import QUIET_S, Choice, State, begin, choices

from atoll.protocol.settings import Settings

CALM_EVERY = 400
"""Every so many states one is let go on calmly."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a search begins, and what it may do."""

    name: str
    learners: int = 2
    faults: int = 2
    rounds: int = 0
    """So many are committed, calmly, before the search begins."""
    quorum: int = 1
    synchronous: bool = False
    steps: int = 0
    """The run's budget; 0: none."""
    cut_every: int = 0
    wait_s: float = 0.0
    """For all learners, before anybody trains."""
    length: int = 0
    """Deep: choices of a run; 0: wide."""

    def settings(self) -> Settings:
        settings = Settings(
            learners=self.learners,
            fragments=2,
            sync_every=2,
            overlap=1,
            quorum=self.quorum,
            synchronous=self.synchronous,
            steps=self.steps,
            cut_every=self.cut_every,
            wait_for_learners_s=self.wait_s,
            heartbeat_s=QUIET_S,
            lost_after_s=2 * QUIET_S,
        )
        return settings.resolved(2)

    def start(self) -> State:
        state = begin(self.settings(), faults=0)
        if self.rounds:
            state = calmly(state, lambda one: one.syncer.machine.committed >= self.rounds)
        state.faults = self.faults
        return state


SCOPES = (
    Scope("a run begins"),
    Scope("a run waits for its learners", wait_s=5.0),
    Scope("rounds under way", rounds=3),
    Scope("a quorum of two, and cuts", rounds=3, quorum=2, cut_every=2),
    Scope("three learners", learners=3, faults=3, rounds=2),
    Scope("synchronous", rounds=3, synchronous=True),
    Scope("the run ends", rounds=6, steps=6),
    Scope("deep: from the beginning to the end", length=40, steps=4, cut_every=2),
    Scope("deep: two must be there", length=24, rounds=2, quorum=2, faults=3),
    Scope("deep: three learners", length=18, learners=3, rounds=2, faults=3),
    Scope("deep: synchronous", length=24, rounds=2, synchronous=True),
)


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str
    path: tuple[Choice, ...]
    story: tuple[str, ...]
    """One line for every choice, and what the syncer said to it."""


@dataclass(frozen=True, slots=True)
class Found:
    scope: Scope
    states: int
    """Distinct ones."""
    new: int
    """Of these, in no search before."""
    choices: int
    """Tried, from all of them."""
    depth: int
    """All interleavings of so many choices were tried; deep: all runs with so many departures. −1: not even one."""
    calm: int
    """States that were let go on calmly."""
    violation: Violation | None = None

    def __str__(self) -> str:
        departures = f"{self.depth} departure{'' if self.depth == 1 else 's'}"
        to = f"{departures} in {self.scope.length} choices" if self.scope.length else f"depth {self.depth}"
        what = f"{self.scope.name}: {self.states:,} states, {self.choices:,} choices, complete to {to}"
        return f"{what}; broken: {self.violation.rule}" if self.violation else what


def search(
    scope: Scope,
    *,
    depth: int = 50,
    states: int = 20_000,
    known: set[bytes] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """To `depth` choices (departures) or so many distinct states. `known`: those of earlier searches, added to here."""
    try:
        start = scope.start()
    except Broken as broken:
        early = Violation(broken.rule, str(broken), (), ("calm, before the search begins", f"!!! {broken}"))
        return Found(scope, 0, 0, 0, 0, 0, early)
    return Search(scope, start, known if known is not None else set()).run(depth, states, progress)


@dataclass(frozen=True, slots=True)
class Node:
    number: int
    state: State
    length: int = 0


class Stop(Exception):
    def __init__(self, violation: Violation) -> None:
        self.violation = violation


class Search:
    def __init__(self, scope: Scope, start: State, known: set[bytes]) -> None:
        self.scope, self.start, self.known = scope, start, known
        self.rules = form(repr(scope.settings()))
        """States under other settings are other states."""
        self.seen: set[bytes] = set()
        self.new = 0
        self.parents: list[tuple[int, Choice]] = [(-1, ("", ""))]
        """How each state was reached first: from which one, by which choice."""
        self.tried = self.calm = 0
        self.sample: list[tuple[int, State]] = []

    def run(self, depth: int, limit: int, progress: Callable[[int, int], None] | None) -> Found:
        self._is_new(self.start)
        layer, reached = [Node(0, self.start)], 0
        try:
            while layer and reached < depth and len(self.parents) < limit:
                coming: list[Node] = []
                while layer and len(self.parents) < limit:
                    self._expand(layer.pop(), layer, coming)
                    if progress is not None:
                        progress(len(self.parents), reached)
                self._go_on()
                reached += not layer
                layer = coming
        except Stop as stop:
            return self._found(reached, stop.violation)
        return self._found(reached)

    def _go_on(self) -> None:
        """A sample of a layer's states, once nothing shorter can be found in it."""
        for number, state in self.sample:
            self.calm += 1
            try:
                goes_on(state)
            except (Broken, AssertionError) as error:
                raise Stop(self._violation(error, self.path(number))) from error
        self.sample.clear()

    def _expand(self, node: Node, layer: list[Node], coming: list[Node]) -> None:
        """What is usual stays in its layer of a deep search; all else belongs to the next."""
        length = self.scope.length
        if length and node.length >= length:
            return
        plain = usual(node.state) if length else None
        for choice in choices(node.state):
            self.tried += 1
            try:
                state = take(node.state, choice)
                if (number := self._enter(node.number, choice, state)) is not None:
                    (layer if choice == plain else coming).append(Node(number, state, node.length + 1))
            except (Broken, AssertionError) as error:
                raise Stop(self._violation(error, (*self.path(node.number), choice))) from error

    def _enter(self, number: int, choice: Choice, state: State) -> int | None:
        """The number of a state that is new."""
        if not self._is_new(state):
            return None
        self.parents.append((number, choice))
        if len(self.parents) % CALM_EVERY == 0:
            self.sample.append((len(self.parents) - 1, state))
        return len(self.parents) - 1

    def _is_new(self, state: State) -> bool:
        mark = self.rules + state.form()
        if mark in self.seen:
            return False
        self.seen.add(mark)
        self.new += mark not in self.known
        self.known.add(mark)
        return True

    def _found(self, depth: int, violation: Violation | None = None) -> Found:
        complete = depth - 1 if self.scope.length else depth
        return Found(self.scope, len(self.parents), self.new, self.tried, complete, self.calm, violation)

    def _violation(self, error: Exception, path: tuple[Choice, ...]) -> Violation:
        rule = error.rule if isinstance(error, Broken) else str(error).split("\n")[0]
        told = story(self.start, path)
        if not told or not told[-1].startswith("!!!"):
            told += ["and then calm", f"!!! {error}"]
        return Violation(rule, str(error), path, tuple(told))

    def path(self, number: int) -> tuple[Choice, ...]:
        path: list[Choice] = []
        while number > 0:
            number, choice = self.parents[number]
            path.append(choice)
        return tuple(reversed(path))


def story(state: State, path: tuple[Choice, ...]) -> list[str]:
    """The choices again, one by one, with what the syncer said; the last may end in a broken rule."""
    lines: list[str] = []
    for kind, whom in path:
        lines.append(f"{kind} {whom}{_about(state, kind, whom)}")
        try:
            state = take(state, (kind, whom), lambda text: lines.append(f"    {text}"))
        except (Broken, AssertionError) as error:
            lines.append(f"!!! {error}")
    return lines


def _about(state: State, kind: str, whom: str) -> str:
    """Which message it is that arrives."""
    if kind not in ("up", "down"):
        return ""
    learner = state.learners[whom]
    message = (learner.up if kind == "up" else learner.down)[0]
    return f": {type(message).__name__}"
