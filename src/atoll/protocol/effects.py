"""What the state machines want done, and what they are told.

`handle(now, event) -> effects`: an event is a fact that has happened, an effect is a wish that somebody outside carries
out in the given order. Both are small frozen structs without tensors; bytes are named by (fragment, version) or by
(learner, round, attempt). Effects are the points at which a process can die.
"""

from __future__ import annotations

import msgspec


class Fact(msgspec.Struct, frozen=True):
    """Base of events and effects."""


class Note(Fact, frozen=True):
    """Effect: a line for the run's events. `text` is for people, `data` for programs."""

    kind: str
    text: str
    data: dict[str, object] = {}


class Tick(Fact, frozen=True):
    """Event: time has passed; sent at or after the machine's `wake_at`."""
