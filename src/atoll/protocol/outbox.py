"""What the syncer wants done after an event, in order; every message leaves with the syncer's vector clock and term.

What is written down is part of the history from the moment it is decided; whoever carries effects out sees to it that
nothing is told before it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.protocol.bounds import MOST
from atoll.protocol.clock import SYNCER, Clock, merged
from atoll.protocol.effects import Discard, Note, Persist, Send, SyncerEffect
from atoll.protocol.history import History
from atoll.protocol.membership import Learner
from atoll.protocol.messages import FromSyncer
from atoll.protocol.records import AnyRecord, encode
from atoll.protocol.taping import Taping


class Outbox:
    def __init__(self, history: History) -> None:
        self.history = history
        self.taping = Taping(history)
        self.clock: Clock = {SYNCER: history.committed}
        """Never changed in place: messages carry it."""
        self.cut = max(history.cuts, default=0)
        self._effects: list[SyncerEffect] = []

    def take(self) -> list[SyncerEffect]:
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: SyncerEffect) -> None:
        self._effects.append(effect)

    def send(self, learner: str, message: FromSyncer) -> None:
        stamped = msgspec.structs.replace(message, clock=self.clock, term=self.history.term, cut=self.cut)
        self.add(Send(learner, stamped))

    def persist(self, *records: AnyRecord, round: int = -1, restored: bool = False) -> None:
        """To be durable before anything that follows is carried out. What was heard of the tape goes with it."""
        lines: tuple[AnyRecord, ...] = (*self.taping.take(), *records)
        for line in lines:
            encode(line)  # what could not be written down is no part of the history
            self.history.apply(line)
        self.add(Persist(lines, round, restored))

    def discard(self, learner: str, number: int, attempt: int) -> None:
        self.add(Discard(learner, number, attempt))

    def note(self, kind: str, text: str, learner: Learner | None = None, **data: object) -> None:
        who: dict[str, object] = {"learner": learner.name, "incarnation": learner.incarnation} if learner else {}
        self.add(Note(kind, text, {**who, **data}))

    def count(self, rounds: int) -> None:
        """So many rounds are behind us."""
        self.clock = {**self.clock, SYNCER: rounds}

    def hear(self, clock: Mapping[str, int]) -> None:
        """Take in what a learner knows of those that joined. How many rounds are behind us nobody tells us."""
        ours, lives = self.clock, self.history.lives
        if newer := {name: t for name, t in clock.items() if MOST > t > ours.get(name, -1) and name in lives}:
            self.clock = merged(ours, newer)
