"""Which copy the training process makes next, and (synchronous) at which step it waits for which round.

Asynchronous: one copy is on order at a time, for a pull that waits or for the round that gathers; until that round
freezes, a fresher one is ordered at every boundary.

Synchronous: the schedule says at which nominal step each round's fragment is read and at which its new version is
adopted; the shift says how the learner's own steps lie to it. Every copy that may be due before the training process
goes on must be ordered before. A learner that the run has gone past takes its place anew.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.protocol import schedule
from atoll.protocol.effects import Hold, LearnerEffect, LetGo, Read
from atoll.protocol.settings import Settings


class Orders:
    def __init__(self, do: Callable[[LearnerEffect], None]) -> None:
        self.settings = Settings()
        self.gathering = 0
        """The round that the syncer gathers."""
        self.pending: dict[int, int] = {}
        """Copies ordered and not made yet: round → step."""
        self._do = do
        self._shift: int | None = None
        """Synchronous: own step minus the run's nominal step."""
        self._last = -1
        """Synchronous: no round up to this one is still to be ordered."""
        self._holds: set[int] = set()

    @property
    def aims(self) -> int:
        return min(self.pending, default=-1)

    def order(self, number: int, step: int) -> None:
        if not self.settings.synchronous:
            self.pending.clear()
        self.pending[number] = step
        self._do(Read(number, schedule.fragment_of(number, self.settings), step))

    def ahead(self, t: int) -> None:
        """Asynchronous: a copy for the round that gathers, a boundary before it is likely to freeze."""
        self.order(self.gathering, t + max(1, int(schedule.interval(self.settings)) - 1))

    # ---- synchronous --------------------------------------------------------------------------------------------

    def align(self, t: int) -> None:
        """Take a place in the run: it stands where the round before the one that gathers is adopted."""
        if self._shift is None:
            nominal = schedule.adopt_step(self.gathering - 1, self.settings) if self.gathering else 0
            self._shift, self._last = t - nominal, self.gathering - 1
            while schedule.read_step(self._last + 1, self.settings) <= nominal:
                self._last += 1
        self.plan(min(self._holds, default=self._last + 1))  # one that comes back has its orders already

    def plan(self, oldest: int) -> None:
        """Order every copy that may be due before round `oldest` is adopted."""
        if self._shift is None:
            return
        until = schedule.adopt_step(oldest, self.settings)
        while schedule.read_step(self._last + 1, self.settings) <= until:
            self._last += 1
            self.order(self._last, schedule.read_step(self._last, self.settings) + self._shift)
            self._holds.add(self._last)
            self._do(Hold(self._last, schedule.adopt_step(self._last, self.settings) + self._shift))

    def behind(self, number: int) -> bool:
        """Whether round `number`, now behind the run, is one this learner has yet to copy."""
        return self._shift is not None and (number in self.pending or number > self._last)

    def adopt_step(self, number: int) -> int:
        """The own step at which the version of this round is taken; 0: at once, for it waits for no such round."""
        if self._shift is None or number not in self._holds:
            return 0
        return schedule.adopt_step(number, self.settings) + self._shift

    def let_go(self, number: int) -> None:
        """Nothing comes of that round. What is due after it must be on order before the training process goes on."""
        if number in self._holds:
            self.plan(number + 1)
        self._holds.discard(number)
        self._do(LetGo(number))

    def adopted(self, fragment: int, number: int) -> None:
        """The training process has taken the version of round `number`, and waits for none before it any more."""
        self._holds -= {n for n in self._holds if n <= number and n % self.settings.fragments == fragment}

    def forget(self) -> None:
        """No place in the run, nothing on order, nothing to wait for."""
        for number in sorted(self._holds):
            self._do(LetGo(number))
        self._holds.clear()
        self.pending.clear()
        self._shift, self._last = None, -1
