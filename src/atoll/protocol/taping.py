"""What the syncer hears of the learners' tapes, until it is written down.

Entries wait for the next record and go to the disk with it, before it: a round never stands in the journal without what
its members' contributions depend on. What a crash takes from here the learners say again, from the number on that the
journal knows. Of one learner no more may wait than twice what it could keep itself, and no more is written down than
TAPE_BYTES and some for every round: a tape grows with the run's rounds. Where entries are missing for good, that is
said once, and the reader of the tape sees it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.protocol.budget import Budgets
from atoll.protocol.history import History
from atoll.protocol.records import Lent, Played, Stretch
from atoll.protocol.tape import KEPT, AnyEntry

GAPS = 64
"""Stretches of one learner that may wait."""
TAPE_BYTES = 256 * 1024
"""Of one learner's tape at once, as the journal has it: all that a training process keeps is about half of it."""
ROUND_BYTES = 1024
"""For every round more; an honest learner says what it adopted and heard of, some 40 bytes."""
PLACE_BYTES = 96
"""What a stretch or a loan costs beside its entries."""

_encoder = msgspec.msgpack.Encoder()


class Taping:
    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: dict[str, list[Stretch]] = {}
        """By learner; more than one only where entries are missing in between."""
        self._lent: list[Lent] = []
        self._room = Budgets(TAPE_BYTES, ROUND_BYTES)
        """By learner, in bytes of the journal; rounds are the time."""
        self._over: set[str] = set()
        """Who said more than that."""

    def heard(self, learner: str, incarnation: int, first: int, entries: Sequence[AnyEntry]) -> str | None:
        """What is missing before these, if anything is."""
        if not entries or (life := self._history.lives.get(learner)) is None:
            return None
        waiting = self._waiting.setdefault(learner, [])
        last = waiting[-1] if waiting else Stretch(learner, incarnation, life.taped, ())
        end = last.first + len(last.entries)
        new = tuple(entries[max(0, end - first) :])
        if new and not self._fits(learner, len(_encoder.encode(new)) + (PLACE_BYTES if first > end else 0)):
            self._over.add(learner)
            return None
        if first > end:
            waiting.append(Stretch(learner, incarnation, first, new))
            return f"entries {end} to {first - 1} of its tape are missing"
        if new:
            waiting[-1:] = [Stretch(learner, last.incarnation, last.first, (*last.entries, *new))]
        return None

    def is_full(self, learner: str) -> bool:
        """Whether this one said more than an honest learner could have kept."""
        waiting = self._waiting.get(learner, ())
        return (
            learner in self._over or len(waiting) > GAPS or sum(len(stretch.entries) for stretch in waiting) > 2 * KEPT
        )

    def lent(self, ticket: str, peer: str, incarnation: int, t: int) -> None:
        """One that lends without end is not written down any more."""
        if self._fits(peer, PLACE_BYTES):
            self._lent.append(Lent(ticket, peer, incarnation, t))

    def _fits(self, learner: str, size: int) -> bool:
        return self._room.take(learner, self._history.committed, size)

    def take(self) -> list[Played | Lent]:
        """All that waits, to be written down now."""
        tapes = tuple(stretch for name in sorted(self._waiting) for stretch in self._waiting[name])
        found: list[Played | Lent] = [*([Played(tapes)] if tapes else []), *self._lent]
        self._waiting, self._lent = {}, []
        self._over.clear()
        return found
