"""What the syncer wants done after an event, in order; every message leaves with the syncer's vector clock."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.protocol.clock import SYNCER, Clock, merged
from atoll.protocol.effects import Discard, Note, Send, SyncerEffect
from atoll.protocol.membership import Learner
from atoll.protocol.messages import FromSyncer


class Outbox:
    def __init__(self) -> None:
        self.clock: Clock = {SYNCER: 0}
        self._effects: list[SyncerEffect] = []

    def take(self) -> list[SyncerEffect]:
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: SyncerEffect) -> None:
        self._effects.append(effect)

    def send(self, learner: str, message: FromSyncer) -> None:
        self.add(Send(learner, msgspec.structs.replace(message, clock=dict(self.clock))))

    def discard(self, learner: str, number: int, attempt: int) -> None:
        self.add(Discard(learner, number, attempt))

    def note(self, kind: str, text: str, learner: Learner | None = None, **data: object) -> None:
        who: dict[str, object] = {"learner": learner.name, "incarnation": learner.incarnation} if learner else {}
        self.add(Note(kind, text, {**who, **data}))

    def hear(self, clock: Mapping[str, int]) -> None:
        """Take in a learner's clock. How many rounds are behind us nobody tells us."""
        self.clock = {**merged(self.clock, clock), SYNCER: self.clock[SYNCER]}
