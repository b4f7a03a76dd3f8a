"""Keeping H honest: one round per H/P learner steps, whatever the network could do.

The pace clock is the median number of steps that the live learners have made. Membership changes must not make it jump,
so at each of them every learner is taken to stand where the clock stands. A run that fell behind by more than one round
does not catch up in a burst: that would sync a fragment again long before its H steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pace:
    interval: float
    """H/P: learner steps from one round to the next."""
    clock: float = 0.0
    due: float = field(default=0.0)
    """The clock at which the next round may freeze."""
    _anchors: dict[str, tuple[int, float]] = field(default_factory=dict)
    _places: dict[str, float] = field(default_factory=dict)
    """Where each learner stands on the clock."""
    _sorted: list[float] = field(default_factory=list)
    """The same places, in order: one of them moves with every report."""

    def __post_init__(self) -> None:
        self.due = self.interval

    def members(self, steps: dict[str, int]) -> None:
        """The live learners have changed."""
        if steps.keys() != self._anchors.keys():
            self._anchors = {learner: (t, self.clock) for learner, t in steps.items()}
            self._places = {learner: self.clock + t - t for learner, t in steps.items()}  # as `stepped` rounds
            self._sorted = sorted(self._places.values())

    def stepped(self, learner: str, t: int) -> None:
        if learner in self._anchors:
            first, clock = self._anchors[learner]
            del self._sorted[bisect_left(self._sorted, self._places[learner])]
            self._places[learner] = clock + t - first
            insort(self._sorted, self._places[learner])
            self.clock = max(self.clock, median(self._sorted))

    def is_due(self) -> bool:
        return self.clock >= self.due - 1e-9

    def froze(self) -> None:
        """A round has used its turn."""
        self.due = max(self.due + self.interval, self.clock - self.interval)


def middle(values: list[float]) -> float:
    """Their median; the list is put in order."""
    values.sort()
    return median(values)


def median(values: list[float]) -> float:
    """Of what is in order already."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
