"""What somebody may cost: so much at once, and so much a second after that.

The time is whoever asks's own: seconds, or a count of rounds. Where it goes back, nothing is given and nothing taken.
"""

from __future__ import annotations

from collections.abc import Hashable

FEW = 256
"""So many are remembered before those that have all of theirs again are forgotten."""


class Budget:
    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst, self._rate = burst, rate
        self._left, self._at = burst, now

    def left(self, now: float) -> float:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left

    def take(self, now: float, amount: float) -> bool:
        """Whether there was so much; if not, nothing is taken."""
        if self.left(now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """Also more than there is: it must then be earned before anything is left again."""
        self._left = self.left(now) - amount

    def whole(self, now: float) -> bool:
        return self.left(now) >= self._burst


class Budgets:
    """One for each of those that cost something."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._of: dict[Hashable, Budget] = {}
        self._look_at = FEW

    def take(self, whose: Hashable, now: float, amount: float) -> bool:
        return self._budget(whose, now).take(now, amount)

    def spend(self, whose: Hashable, now: float, amount: float) -> None:
        self._budget(whose, now).spend(now, amount)

    def any_left(self, whose: Hashable, now: float) -> bool:
        return whose not in self._of or self._of[whose].left(now) > 0

    def _budget(self, whose: Hashable, now: float) -> Budget:
        if (budget := self._of.get(whose)) is None:
            self._forget(now)
            budget = self._of[whose] = Budget(self._burst, self._rate, now)
        return budget

    def _forget(self, now: float) -> None:
        """Who has all of it again is as one that never came."""
        if len(self._of) >= self._look_at:
            self._of = {whose: budget for whose, budget in self._of.items() if not budget.whole(now)}
            self._look_at = max(FEW, 2 * len(self._of))
