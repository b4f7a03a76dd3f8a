"""What the syncer hears of the learners' tapes, until it is written down.

Entries wait for the next record and go to the disk with it, before it: a round never stands in the journal without what
its members' contributions depend on. What a crash takes from here the learners say again, from the number on that the
journal knows. Of one learner no more may wait than twice what it could keep itself. Where entries are missing for good,
that is said once, and the reader of the tape sees it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.protocol.history import History
from atoll.protocol.records import Lent, Played, Stretch
from atoll.protocol.tape import KEPT, AnyEntry

GAPS = 64
"""Stretches of one learner that may wait."""


class Taping:
    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: dict[str, list[Stretch]] = {}
        """By learner; more than one only where entries are missing in between."""
        self._lent: list[Lent] = []

    def heard(self, learner: str, incarnation: int, first: int, entries: Sequence[AnyEntry]) -> str | None:
        """What is missing before these, if anything is."""
        if not entries or (life := self._history.lives.get(learner)) is None:
            return None
        waiting = self._waiting.setdefault(learner, [])
        last = waiting[-1] if waiting else Stretch(learner, incarnation, life.taped, ())
        end = last.first + len(last.entries)
        new = tuple(entries[max(0, end - first) :])
        if first > end:
            waiting.append(Stretch(learner, incarnation, first, new))
            return f"entries {end} to {first - 1} of its tape are missing"
        if new:
            waiting[-1:] = [Stretch(learner, last.incarnation, last.first, (*last.entries, *new))]
        return None

    def is_full(self, learner: str) -> bool:
        """Whether more waits of this one than an honest learner could have kept."""
        waiting = self._waiting.get(learner, ())
        return len(waiting) > GAPS or sum(len(stretch.entries) for stretch in waiting) > 2 * KEPT

    def lent(self, ticket: str, peer: str, incarnation: int, t: int) -> None:
        self._lent.append(Lent(ticket, peer, incarnation, t))

    def take(self) -> list[Played | Lent]:
        """All that waits, to be written down now."""
        tapes = tuple(stretch for name in sorted(self._waiting) for stretch in self._waiting[name])
        found: list[Played | Lent] = [*([Played(tapes)] if tapes else []), *self._lent]
        self._waiting, self._lent = {}, []
        return found
