"""A learner's copies and the pulls they answer: at hand, waited for, on their way to the syncer.

One copy of a fragment is at hand at a time, the newest. A pull that finds none waits for the next boundary. What a
contribution says of itself (step, counters, base) is what its copy said when it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.effects import Copied, Drop, LearnerEffect, Upload
from atoll.protocol.messages import Contribution, Pull


@dataclass(slots=True)
class Copies:
    do: Callable[[LearnerEffect], None]
    offer: int = -1
    """The newest round that a copy was made for."""
    waiting: dict[int, Pull] = field(default_factory=dict)
    """Pulls that wait for a copy, by fragment; the oldest first."""
    _at_hand: dict[int, Copied] = field(default_factory=dict)
    _sent: dict[tuple[int, int], tuple[Copied, Pull]] = field(default_factory=dict)
    """(round, attempt) → what is on its way."""

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._at_hand

    def read_at(self, fragment: int) -> int:
        """The step of the copy at hand; -1 when there is none."""
        return self._at_hand[fragment].t if fragment in self._at_hand else -1

    def keep(self, copy: Copied) -> Pull | None:
        """It takes the place of an older one; the pull that waited for it, if one did."""
        old = self._at_hand.get(copy.fragment)
        if old is not None and old.t != copy.t:
            self.do(Drop(copy.fragment, old.t))
        self._at_hand[copy.fragment] = copy
        self.offer = max(self.offer, copy.round)
        return self.waiting.pop(copy.fragment, None)

    def drop(self, fragment: int, until: int | None = None) -> int | None:
        """Of no more use; with `until`, only a copy made for that round or one before it. The round it was made for."""
        copy = self._at_hand.get(fragment)
        if copy is None or (until is not None and copy.round > until):
            return None
        del self._at_hand[fragment]
        self.do(Drop(fragment, copy.t))
        return copy.round

    def is_on_its_way(self, pull: Pull) -> bool:
        return (pull.round, pull.attempt) in self._sent

    def send(self, pull: Pull) -> bool:
        """Send the copy at hand as the answer; False when there is nothing in it."""
        copy = self._at_hand[pull.fragment]
        if copy.steps == 0 and not pull.probe:
            return False
        self._sent[pull.round, pull.attempt] = (copy, pull)
        self.do(Upload(pull.round, pull.attempt, pull.fragment))
        return True

    def arrived(self, number: int, attempt: int, digest: str) -> Contribution | None:
        """What to say of a body that has arrived; None when nobody wants it any more."""
        if (sent := self._sent.pop((number, attempt), None)) is None:
            return None
        copy, pull = sent
        return Contribution(
            round=number,
            attempt=attempt,
            fragment=copy.fragment,
            base=copy.base,
            t=copy.t,
            steps=copy.steps,
            tokens=copy.tokens,
            digest=digest,
            probe=pull.probe,
            total=copy.total,
            position=copy.position,
        )

    def failed(self, number: int, attempt: int, *, keep: bool) -> bool:
        """It did not get there; whether anybody may still wait for it. The next pull gets a new copy, or (`keep`) the
        same: a learner that waits for a round makes no other."""
        if (sent := self._sent.pop((number, attempt), None)) is None:
            return False
        if not keep and self._at_hand.get(sent[0].fragment) is sent[0]:
            self.drop(sent[0].fragment)
        return True

    def committed(self, fragment: int, number: int) -> None:
        """The round is behind the run: nobody waits for an answer to it."""
        waits = self.waiting.get(fragment)
        if waits is not None and waits.round <= number:
            del self.waiting[fragment]

    def disconnect(self) -> None:
        """The connection is gone, and with it every pull."""
        self.waiting.clear()
        self._sent.clear()

    def forget(self) -> None:
        for fragment in list(self._at_hand):
            self.drop(fragment)
        self.disconnect()
        self.offer = -1
