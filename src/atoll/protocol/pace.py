"""The run's step, and keeping H honest: one round per H/P learner steps, whatever the network could do.

The pace clock is the median number of steps that the live learners have made. Membership changes must not make it jump,
so at each of them every learner is taken to stand where the clock stands. A run that fell behind by more than one round
does not catch up in a burst: that would sync a fragment again long before its H steps.

The clock is also the run's step: it never falls, it is written down with every round, and a later term goes on from
what is written. One learner of several cannot move it far by claiming steps: of three or more the median stays among
the steps of the others, and of two the one that is ahead counts for at most `APART` times the other. In a synchronous
run no report moves it: there the schedule says at which step each round is (schedule.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

APART = 16.0
"""So many times as fast as the other one of two learners may be believed to be. Honest ones that differ by more are
only paced a little more slowly than their mean."""


@dataclass(slots=True)
class Pace:
    interval: float
    """H/P: learner steps from one round to the next."""
    clock: float = 0.0
    due: float = field(default=0.0)
    """The clock at which the next round may freeze."""
    _anchored_at: float = 0.0
    """The clock when the live learners last changed …"""
    _anchors: dict[str, int] = field(default_factory=dict)
    """… and the steps that each of them had made then."""
    _places: dict[str, float] = field(default_factory=dict)
    """Where each learner stands on the clock."""
    _sorted: list[float] = field(default_factory=list)
    """The same places, in order: one of them moves with every report."""

    def __post_init__(self) -> None:
        self.due = self.interval

    def members(self, steps: dict[str, int]) -> None:
        """The live learners have changed."""
        if steps.keys() != self._anchors.keys():
            self._anchored_at, self._anchors = self.clock, dict(steps)
            self._places = {learner: self.clock + t - t for learner, t in steps.items()}  # as `stepped` rounds
            self._sorted = sorted(self._places.values())

    def stepped(self, learner: str, t: int) -> None:
        if learner in self._anchors:
            del self._sorted[bisect_left(self._sorted, self._places[learner])]
            self._places[learner] = self._anchored_at + t - self._anchors[learner]
            insort(self._sorted, self._places[learner])
            self.clock = max(self.clock, self._middle())

    def _middle(self) -> float:
        """The median place; of two in the middle, the upper one as far as it is believed."""
        half, odd = divmod(len(self._sorted), 2)
        if odd:
            return self._sorted[half]
        lower, upper = self._sorted[half - 1 : half + 1]
        most = self._anchored_at + APART * (1.0 + lower - self._anchored_at)
        return (lower + min(upper, most)) / 2

    def go_on_from(self, step: float) -> None:
        """An earlier term came this far. The next round is due an interval later: none is made up for."""
        self.clock, self.due = step, step + self.interval

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
