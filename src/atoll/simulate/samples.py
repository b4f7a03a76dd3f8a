"""Who holds which samples, and which are in the model, by the records alone.

A sample is in one holder's hands at a time, and issued again only if no version contains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.records import Gone, Granted, Share
from atoll.simulate.violation import Violation

NAME = "a data range is issued again only if no fragment has merged it"
ONE = "a sample is in one holder's hands at a time"
Pass = tuple[int, int]
"""Dataset and epoch."""
Piece = tuple[int, int, str]
"""From where to where, and whose."""


@dataclass(slots=True)
class Life:
    granted: list[Granted] = field(default_factory=list)
    merged_to: int = 0
    over: bool = False


class Samples:
    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], Life] = {}
        self._held: dict[Pass, dict[int, Piece]] = {}
        self._merged: dict[Pass, dict[int, Piece]] = {}
        """Per pass and lease: what of it is held, and what of it is in the model."""

    def granted(self, lease: Granted) -> None:
        where = (lease.dataset, lease.epoch)
        for ranges, name in ((self._held, ONE), (self._merged, NAME)):
            for start, stop, who in ranges.get(where, {}).values():
                if start < lease.stop and lease.start < stop:
                    said = f"samples {lease.start} to {lease.stop} of pass {where} go to {lease.learner}"
                    raise Violation(name, f"{said}; {start} to {stop} are {who}'s", lease.learner)
        self.lives.setdefault((lease.learner, lease.incarnation), Life()).granted.append(lease)
        self._held.setdefault(where, {})[lease.lease] = (lease.start, lease.stop, lease.learner)

    def merged(self, number: int, share: Share) -> None:
        """All it had taken by then is in the model, or was dropped on the way there."""
        life = self.lives.get((share.learner, share.incarnation))
        if life is None or share.position <= life.merged_to:
            return
        for lease, start, stop in _between(life.granted, life.merged_to, share.position):
            merged = self._merged.setdefault((lease.dataset, lease.epoch), {})
            for of, (low, high, who) in merged.items():
                if of != lease.lease and low < stop and start < high:
                    said = f"round {number} merges samples {start} to {stop} of {share.learner}, merged by {who} before"
                    raise Violation(NAME, said, share.learner)
            merged[lease.lease] = (lease.start, stop, share.learner)
        life.merged_to = share.position

    def gone(self, gone: Gone) -> None:
        life = self.lives.get((gone.learner, gone.incarnation))
        if life is None or life.over:
            return
        life.over = True
        for lease in life.granted:
            del self._held[lease.dataset, lease.epoch][lease.lease]


def _between(granted: list[Granted], low: int, high: int) -> list[tuple[Granted, int, int]]:
    """The pieces of its leases that it took from position `low` to position `high`."""
    pieces, at = [], 0
    for lease in granted:
        size = lease.stop - lease.start
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            pieces.append((lease, lease.start + start, lease.start + stop))
        at += size
    return pieces
