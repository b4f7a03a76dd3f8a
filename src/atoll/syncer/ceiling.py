"""The most memory that a syncer takes, whatever its peers do: a sum of what each bound allows.

| what | bytes |
| --- | --- |
| the program | 256 MiB: Python, NumPy, compiled kernels, what talk leaves behind |
| the model | Θ and the outer state; of each fragment also the next version and OLD that somebody still reads |
| a cut | the outer state once more, while it is written |
| a rollback | Θ three times and the outer state twice more, with guard = "rollback" |
| one learner | for each of its pulls a body and what is decoded of it; its queues, both ways; what waits of its tape |
| states passed on | as many streams, and as much of each, as the relay lets through |
| connections | as many as there may be, whoever holds them |
| the filter | of as many learners as may be there, for every fragment the direction of what each gave last |
| one name | what is kept of a learner for good, also when it has left; a token brings so many (`Token.names`) |
"""

from __future__ import annotations

import msgspec

from atoll.fabric.relay import RelayLimits
from atoll.fabric.wire import KIB, MIB, Limits
from atoll.numerics.agreement import BUCKETS
from atoll.numerics.codec import make_codec
from atoll.numerics.filter import NAMES
from atoll.numerics.fragments import Plan
from atoll.protocol import schedule
from atoll.protocol.settings import Settings
from atoll.protocol.taping import TAPE_BYTES
from atoll.syncer.parameters import OLD

PROGRAM = 256 * MIB
CONNECTION = 320 * KIB
"""An open connection: headers, buffers of the socket, and of TLS, which are most of it."""
NAME = 4 * KIB
NAME_FRAGMENT = 512
"""What is kept of a name: its life, its tokens, its place in the status; and of each fragment what was merged."""
TAPE = 16
"""Times the bytes of a tape in the journal, as objects of Python."""
MISSES = 3
"""Pulls of a learner beside those of its rounds: two that it missed, and a probe."""


class Ceiling(msgspec.Struct, frozen=True):
    fixed: int
    """Whoever is there."""
    each: int
    """For each learner that is there."""
    name: int = 0
    """For each name that ever was."""

    def bytes(self, learners: int, names: int = 0) -> int:
        return self.fixed + learners * self.each + names * self.name


def ceiling(
    plan: Plan, settings: Settings, slots: int, limits: Limits | None = None, relay: RelayLimits | None = None
) -> Ceiling:
    """`slots`: of the outer optimizer, per parameter."""
    limits, relay = limits or Limits(), relay or RelayLimits()
    model, largest = 4 * plan.size, 4 * plan.largest
    fixed = PROGRAM + model * (1 + 1 + OLD) + 2 * slots * model + 2 * largest
    if settings.guard == "rollback":
        fixed += 2 * (1 + slots) * model + model + largest
    fixed += relay.streams * relay.window_bytes + limits.connections * CONNECTION
    fixed += NAMES * settings.fragments * BUCKETS * 8
    pulls = schedule.flights(settings) + MISSES
    body = make_codec(settings.codec).nbytes(plan.largest)
    talk = limits.queue_bytes + 2 * limits.control_bytes + TAPE * TAPE_BYTES
    return Ceiling(fixed, pulls * (body + largest) + talk, NAME + settings.fragments * NAME_FRAGMENT)
