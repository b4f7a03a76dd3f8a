"""Which copy the training process makes next, and (synchronous) at which step it waits for which round.

Asynchronous: at every boundary the learner copies each fragment that comes due before its next boundary: one where it
keeps the run's pace, several where it is slower (several rounds then go by during one of its steps). A round that has
not frozen by the next boundary gets a fresher copy there. A pull that finds no copy is served at the next boundary.

Synchronous: the schedule says at which nominal step each round's fragment is read and at which its new version is
adopted; the shift says how the learner's own steps lie to it. Every copy that may be due before the training process
goes on must be ordered before. A learner that the run has gone past takes its place anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from atoll.protocol import schedule
from atoll.protocol.effects import CancelRead, Hold, LearnerEffect, LetGo, Read
from atoll.protocol.settings import Settings

RECENT = 16
"""Own steps, and rounds, by which a learner judges what comes due before its next boundary."""


class RoundsPerStep:
    """How the run's rounds lie to this learner's own steps, of late.

    Counted, not timed: how many rounds went by between two boundaries says all, whatever made them fast or slow. The
    most of the last few is what the next boundary prepares for, because a missing copy costs a round and a needless one
    only a copy.
    """

    def __init__(self) -> None:
        self._passed: deque[int] = deque(maxlen=RECENT)
        """Rounds that began to gather between two boundaries."""
        self._gaps: deque[int] = deque(maxlen=RECENT)
        """Own steps from one round's gathering to the next one's."""
        self._boundary: tuple[int, int] | None = None
        self._moved: tuple[int, int] | None = None

    def pass_boundary(self, t: int, gathering: int) -> None:
        if self._boundary is not None and t > self._boundary[0]:
            steps, rounds = t - self._boundary[0], gathering - self._boundary[1]
            self._passed.append(-(-rounds // steps))
        self._boundary = (t, gathering)

    def move_on(self, t: int, gathering: int) -> None:
        if self._moved is not None and gathering > self._moved[1]:
            self._gaps.append((t - self._moved[0]) // (gathering - self._moved[1]))
        self._moved = (t, gathering)

    def count_ahead(self, settings: Settings) -> int:
        """Rounds that may freeze before the next boundary."""
        most = max(self._passed, default=-(-settings.fragments // settings.sync_every))
        return max(1, min(most, settings.fragments))

    def steps_to_next(self, settings: Settings) -> int:
        """Own steps after which a round that has just begun to gather wants its first copy."""
        return max(1, min([*self._gaps, int(schedule.interval(settings))]) - 1)


class Orders:
    def __init__(self, do: Callable[[LearnerEffect], None]) -> None:
        self.settings = Settings()
        self.gathering = 0
        """The round that the syncer gathers."""
        self.pending: dict[int, int] = {}
        """Copies ordered and not made yet: round → step."""
        self._do = do
        self._rounds_per_step = RoundsPerStep()
        self._first_step = 0
        """Asynchronous: no boundary before this step copies for the round that gathers."""
        self._shift: int | None = None
        """Synchronous: own step minus the run's nominal step."""
        self._last = -1
        """Synchronous: no round up to this one is still to be ordered."""
        self._holds: set[int] = set()

    @property
    def aims(self) -> int:
        return min(self.pending, default=-1)

    def order(self, number: int, step: int) -> None:
        self.pending[number] = step
        self._do(Read(number, schedule.fragment_of(number, self.settings), step))

    # ---- asynchronous -------------------------------------------------------------------------------------------

    def pass_boundary(self, t: int) -> None:
        self._rounds_per_step.pass_boundary(t, self.gathering)

    def move_on(self, t: int, gathering: int) -> None:
        """The syncer gathers a later round."""
        self.gathering = gathering
        self._rounds_per_step.move_on(t, gathering)
        self._first_step = t + self._rounds_per_step.steps_to_next(self.settings)

    def order_ahead(self, t: int, waited_for: Iterable[int]) -> None:
        """Order the copies that rounds may want before the boundary after the coming one, and what pulls wait for."""
        step = max(t + 1, self._first_step)
        count = self._rounds_per_step.count_ahead(self.settings)
        wanted = dict.fromkeys(range(self.gathering, self.gathering + count), step)
        wanted |= dict.fromkeys(waited_for, t)
        # Those of this boundary may be on their way off the device; older ones had no slot and were never made.
        for number in [n for n, at in self.pending.items() if n not in wanted and at != t]:
            del self.pending[number]
            self._do(CancelRead(number))
        for number, at in wanted.items():
            if self.pending.get(number) != at:
                self.order(number, at)

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

    def void_copy(self, number: int | None) -> None:
        """The copy for that round is gone before its version came, as when the run is rolled back: a learner that
        still waited for the round could make no other copy, and nobody would ever get an answer from it."""
        if number in self._holds:
            self.let_go(number)

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
