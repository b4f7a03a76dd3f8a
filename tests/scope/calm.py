"""The usual order of things in the small-scope search: what a calm run would do next.

All that takes no time happens first, then timers that are due, then whoever has made the fewest steps makes one.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.scope.checks import Broken
from tests.scope.turn import take
from tests.scope.world import Choice, State, choices

PROMPT = ("fsync", "merge", "cut", "lost", "start", "dial", "down", "up", "whole", "body", "fetch", "state", "save")
"""What takes no time, in this order."""
PATIENCE = 5000
"""Choices after which a calm run must have come to what it is waited for."""


def usual(state: State) -> Choice | None:
    """What comes next when nothing goes wrong; None: nothing can happen any more."""
    return min((one for one in choices(state) if one[0] in _ORDER), key=lambda one: _rank(state, one), default=None)


_ORDER = {kind: rank for rank, kind in enumerate((*PROMPT, "timer", "step"))}


def _rank(state: State, choice: Choice) -> tuple[float, ...]:
    kind, whom = choice
    if kind == "step":
        return _ORDER[kind], state.learners[whom].process.t
    if kind == "timer":
        wake = wake_of(state, whom)
        late = 0 if wake <= state.now else 10  # one that is not due yet comes after the steps
        return _ORDER[kind] + late, wake
    return (_ORDER[kind],)


def wake_of(state: State, whom: str) -> float:
    machine = state.syncers[int(whom)].machine if whom.isdigit() else state.learners[whom].process.machine
    assert machine.wake_at is not None
    return machine.wake_at


def calmly(state: State, until: Callable[[State], bool]) -> State:
    for _ in range(PATIENCE):
        choice = usual(state)
        if until(state):
            return state
        if choice is None:
            break
        state = take(state, choice)
    machine = state.syncer.machine
    raise TimeoutError(f"round {machine.committed}, {machine.phase}, after {PATIENCE} calm choices")


def goes_on(state: State) -> None:
    """From here, without faults, two more cycles of rounds are committed and everyone is current, or the run ends."""
    aim = state.syncer.machine.committed + 2 * state.durable.settings.fragments

    def is_current(one: State) -> bool:
        versions = one.syncer.machine.versions
        lag = [new - old for p in one.learners.values() for new, old in zip(versions, p.process.adopted, strict=True)]
        return one.syncer.machine.committed >= aim and max(lag) <= 1

    try:
        calmly(state, lambda one: one.syncer.machine.phase == "finished" or is_current(one))
    except TimeoutError as error:
        raise Broken("when faults stop, rounds go on and everyone is current", str(error)) from None
