"""What is missing where rounds are committed more slowly than one per H/P steps, in one sentence with figures.

All of it is measured: the time between two commits while rounds were behind, the bytes of a contribution, and how long
members take to answer. Rates are of those bytes alone, one way: from a learner to the syncer.
"""

from __future__ import annotations

from math import ceil

from atoll.protocol import schedule
from atoll.protocol.syncer.flights import Flights
from atoll.protocol.syncer.machine import Syncer

MOST_OF = 0.8
"""The syncer itself is what is slow if merging and writing take this share of the time between two commits."""
GIGABIT = 1e9 / 8
MIB = 2**20


def describe_shortage(machine: Syncer) -> str:
    """Empty: nothing is missing."""
    flights, settings, step_s = machine.rounds.flights, machine.settings, machine.members.step_s()
    if machine.phase != "running" or settings.synchronous or step_s is None:
        return ""
    if flights.lacks_memory:
        return _memory(flights, len(machine.members.stepping_learners()))
    if not flights.is_short or flights.gap_s is None:
        return ""
    due_s = schedule.interval(settings) * step_s
    behind = flights.gap_s / due_s
    if behind <= 1:
        return ""
    fits = f"sync_every = {ceil(settings.sync_every * behind - 1e-6)} would fit"
    if (merging_s := flights.merging_s.value or 0.0) >= MOST_OF * flights.gap_s:
        return f"the syncer merges and writes a round in {merging_s:.3g} s, and one is due every {due_s:.3g} s: {fits}"
    slowest = max(machine.members.live_learners(), key=lambda one: one.answer_s.value or 0.0, default=None)
    body = flights.bodies.get(settings.codec)
    if slowest is None or body is None:
        return ""
    has, needs = body / flights.gap_s / GIGABIT, body / due_s / GIGABIT
    smaller = [name for name, size in flights.bodies.items() if size * behind <= body]
    if smaller:
        fits += f", or codec = {max(smaller, key=flights.bodies.__getitem__)}"
    return (
        f"{slowest.name} answers slowest: {has:.3g} Gbit/s come from it where H = {settings.sync_every} takes "
        f"{needs:.3g}, so {needs - has:.2g} Gbit/s are missing: {fits}"
    )


def _memory(flights: Flights, learners: int) -> str:
    needed = ceil(flights.needed * max(1, learners) * flights.contribution_bytes / MIB)
    return (
        f"round_memory_mib allows {flights.affordable} rounds under way where {flights.needed} keep H: "
        f"round_memory_mib = {needed} would do"
    )
