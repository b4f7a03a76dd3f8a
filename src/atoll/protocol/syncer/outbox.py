"""The effects of one event, in order. Every message carries the number of rounds behind the syncer, and its term.

A record is part of the history from the moment it is decided. effect_order.py makes sure that nothing is sent before
the records in front of it are durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from atoll.protocol.clock import SYNCER, Clock
from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.limits import Budgets
from atoll.protocol.messages import FromSyncer, Message
from atoll.protocol.records import AnyRecord, LentRecord, PlayedRecord, Stretch, encode
from atoll.protocol.syncer.effects import Discard, Persist, Send, SyncerEffect
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.tape import KEPT, AnyEntry

M = TypeVar("M", bound=Message)


class Outbox:
    def __init__(self, history: History) -> None:
        self.history = history
        self.taping = Taping(history)
        self.clock: Clock = {SYNCER: history.committed}
        """Never changed in place: messages carry it."""
        self.cut = max(history.cuts, default=0)
        self._effects: list[SyncerEffect] = []

    def take_effects(self) -> list[SyncerEffect]:
        effects, self._effects = self._effects, []
        return effects

    def add_effect(self, effect: SyncerEffect) -> None:
        self._effects.append(effect)

    def send(self, learner: str, message: FromSyncer) -> None:
        self.add_effect(Send(learner, self.stamp(message)))

    def stamp(self, message: M) -> M:
        """Return the message with the clock, the term and the cut that every message of this moment carries."""
        return msgspec.structs.replace(message, clock=self.clock, term=self.history.term, cut=self.cut)

    def persist(self, *records: AnyRecord, round: int = -1, restored: bool = False) -> None:
        """To be durable before anything that follows is carried out. What was heard of the tape goes with it."""
        lines: tuple[AnyRecord, ...] = (*self.taping.take_records(), *records)
        for line in lines:
            encode(line)  # first: a record that cannot be encoded must not change the history
            self.history.apply(line)
        self.add_effect(Persist(lines, round, restored))

    def discard(self, learner: str, number: int, attempt: int) -> None:
        self.add_effect(Discard(learner, number, attempt))

    def note(self, kind: str, text: str, learner: KnownLearner | None = None, **data: object) -> None:
        who: dict[str, object] = {"learner": learner.name, "incarnation": learner.incarnation} if learner else {}
        self.add_effect(Note(kind, text, {**who, **data}))

    def count_rounds(self, rounds: int) -> None:
        """So many rounds are behind us."""
        self.clock = {SYNCER: rounds}


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
    """What the syncer hears of the learners' tapes, until it is written down.

    Entries wait for the next record and go to the disk with it, before it: a round never stands in the journal
    without what its members' contributions depend on. What a crash takes from here the learners say again, from the
    number on that the journal knows. Of one learner no more may wait than twice what it could keep itself, and no
    more is written down than TAPE_BYTES and some for every round: a tape grows with the run's rounds. Where entries
    are missing for good, that is said once, and the reader of the tape sees it too.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: dict[str, list[Stretch]] = {}
        """By learner; more than one only where entries are missing in between."""
        self._lent: list[LentRecord] = []
        self._room = Budgets(TAPE_BYTES, ROUND_BYTES)
        """By learner, in bytes of the journal; rounds are the time."""
        self._over: set[str] = set()
        """Who said more than that."""

    def add_entries(self, learner: str, incarnation: int, first: int, entries: Sequence[AnyEntry]) -> str | None:
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

    def note_lent_state(self, ticket: str, peer: str, incarnation: int, t: int) -> None:
        """One that lends without end is not written down any more."""
        if self._fits(peer, PLACE_BYTES):
            self._lent.append(LentRecord(ticket, peer, incarnation, t))

    def _fits(self, learner: str, size: int) -> bool:
        return self._room.take(learner, self._history.committed, size)

    def take_records(self) -> list[PlayedRecord | LentRecord]:
        """All that waits, to be written down now."""
        tapes = tuple(stretch for name in sorted(self._waiting) for stretch in self._waiting[name])
        found: list[PlayedRecord | LentRecord] = [*([PlayedRecord(tapes)] if tapes else []), *self._lent]
        self._waiting, self._lent = {}, []
        self._over.clear()
        return found
