"""Which fragment a round takes, when it is due, and how many rounds may be under way.

Round n takes fragment n mod P, and there is one round per H/P learner steps: round n belongs to learner step
⌈(n + 1)·H/P⌉. Synchronous learners read its fragment τ steps before that and adopt the new version there; where τ
leaves no step before the first reading, the whole schedule is shifted until there is one.

With phases of training (phases.py) each phase of a synchronous run has so many rounds, and is counted from its first
one on. It is shifted until its first reading comes after the last adoption of the phase before. Learners know all of it
from the settings, so they wait for no message.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor
from typing import NamedTuple

from atoll.protocol.settings import Settings


def fragment_of(round: int, settings: Settings) -> int:
    return round % settings.fragments


def interval(settings: Settings) -> float:
    """Learner steps from one round to the next."""
    return settings.sync_every / settings.fragments


def has_turn(round: int, share: float, settings: Settings) -> bool:
    """Return whether a learner with this share of the rounds takes part in this one. The turns of each cycle begin one
    fragment earlier than those of the cycle before, so that every fragment has its turn."""
    turn = round % settings.fragments + round // settings.fragments
    return floor((turn + 1) * share + 1e-9) > floor(turn * share + 1e-9)


class RoundSpan(NamedTuple):
    """The rounds of one phase of a synchronous run, or of all of it."""

    number: int
    """Of the phase; 0: there are none."""
    first: int
    """Its first round …"""
    begins: int
    """… and the run's step then, in 1/P steps."""
    sync_every: int
    overlap: int
    shift: int
    """Nominal learner steps by which all of it comes later."""


def spans(settings: Settings) -> Iterator[RoundSpan]:
    first = begins = shift = 0
    if not settings.phases:
        shift = _shift_behind(shift, begins, settings.sync_every, settings.overlap, settings.fragments)
        yield RoundSpan(0, first, begins, settings.sync_every, settings.overlap, shift)
    for number, phase in enumerate(settings.phases, 1):
        assert phase.sync_every is not None and phase.overlap is not None, "phases are resolved"
        shift = _shift_behind(shift, begins, phase.sync_every, phase.overlap, settings.fragments)
        yield RoundSpan(number, first, begins, phase.sync_every, phase.overlap, shift)
        rounds = ceil((phase.until * settings.steps * settings.fragments - begins) / phase.sync_every - 1e-9)
        first, begins = first + max(0, rounds), begins + max(0, rounds) * phase.sync_every


def _shift_behind(shift: int, begins: int, sync_every: int, overlap: int, fragments: int) -> int:
    """So that the first reading comes at least a step after the last adoption before it."""
    steps = -(-(begins + sync_every) // fragments) - -(-begins // fragments)
    return max(0, shift + overlap + 1 - steps)


def span_of(round: int, settings: Settings) -> RoundSpan:
    """Behind the end of the last phase its schedule goes on."""
    return [one for one in spans(settings) if one.first <= max(0, round)][-1]


def adopt_step(round: int, settings: Settings) -> int:
    """The nominal learner step at which the round's new version is taken."""
    span = span_of(round, settings)
    behind = span.begins + (round - span.first + 1) * span.sync_every
    return -(-behind // settings.fragments) + span.shift


def read_step(round: int, settings: Settings) -> int:
    """The nominal learner step after which a synchronous learner copies the round's fragment."""
    return adopt_step(round, settings) - span_of(round, settings).overlap


def first_read_with(round: int, settings: Settings) -> int:
    """The first of the rounds whose fragments are copied at the same step: with H below P there are several."""
    first = round
    while first > 0 and read_step(first - 1, settings) == read_step(round, settings):
        first -= 1
    return first


def least_flights(settings: Settings) -> int:
    """Rounds that may always be between freezing and commit: ⌈max(1, τ)·P/H⌉. Synchronous runs have no more."""
    steps = max(1, settings.overlap)
    return min(settings.fragments, -(-steps * settings.fragments // settings.sync_every))


def most_flights(settings: Settings) -> int:
    """The most rounds between freezing and commit: one per fragment, and one fragment is left to gather."""
    least = least_flights(settings)
    return least if settings.synchronous else max(least, settings.fragments - 1)


def affordable_flights(budget: int, bytes_each: int, learners: int, settings: Settings) -> int:
    """Rounds whose contributions, of so many bytes in memory from each of the learners, fit into the budget. What τ
    asks for is always allowed."""
    most = most_flights(settings)
    taken = bytes_each * max(1, learners)
    return most if taken <= 0 else max(least_flights(settings), min(most, budget // taken))


def step_after(step: float, rounds: int, settings: Settings) -> float:
    """Synchronous: the run's step when so many more rounds are behind it than at `step`.

    A sum of H/P would drift. The steps that `step` stands for are a whole number of 1/P, and what comes out is again
    the one float next to such a number: the same in one term and in many, and never short of a budget by rounding.
    """
    return (round(step * settings.fragments) + rounds * settings.sync_every) / settings.fragments


CROSSINGS = 6
"""Messages and bodies that cross the link, one after another, between the boundary at which a copy is read and the one
at which the version that holds it is adopted: report, pull, body, announcement, request, version."""


def least_overlap_s(one_way_s: float, up_s: float, down_s: float, work_s: float, crossings: int = CROSSINGS) -> float:
    """Return the seconds from reading a copy to having the version that holds it, on links that are free. `up_s`,
    `down_s`: seconds that a body takes on each way; `work_s`: merge and disk. The overlap is at least this, in steps,
    rounded up (docs/protocol.md, "The floor of the overlap")."""
    return crossings * one_way_s + up_s + down_s + work_s
