"""Whether the learners are there that a run waits for, before it opens rounds or comes to its end.

Rules kept here, each with its test: a new term lets the learners come back that it knows, before its rounds begin: who
misses them would drop what it trained on meanwhile; and longer before it ends: their last steps are to be collected. A
synchronous run begins, and goes on in a new term, when all its learners are there, or a while later.
"""

from __future__ import annotations

from atoll.protocol.membership import Membership
from atoll.protocol.rounds import Rounds
from atoll.protocol.settings import Settings

RETURN_S = 1.5
"""So long a new term's rounds wait for the learners it knows: whoever lives dials every second."""


class Assembling:
    def __init__(self, settings: Settings, members: Membership, rounds: Rounds, *, returning: bool) -> None:
        self.settings, self.members, self.rounds = settings, members, rounds
        self.returning = returning
        """The learners of an earlier term are coming back."""
        self._back_by: float | None = None
        """The end of the run waits for them until then."""
        self._started_at = 0.0
        self._opened = False
        """The first round of this term is open."""
        self._everybody = False
        """Those that have left are to come back too."""

    def started(self, now: float) -> None:
        """The run has its first parameters."""
        self._started_at = now

    def reopen(self) -> None:
        """A run that had ended goes on: all its learners have left, and a synchronous run waits for all of them."""
        self._everybody = True

    def may_end(self, now: float, wakes: list[float]) -> bool:
        """Whether everybody is back, or has had the time to."""
        if not self.returning:
            return True
        away = [one for one in self.members.learners.values() if one.state != "training" and not one.closed]
        self._back_by = self._back_by if self._back_by is not None else now + self.settings.patience_s
        self.returning = bool(away) and now < self._back_by
        if self.returning:
            wakes.append(self._back_by)
        return not self.returning

    def may_open(self, now: float, wakes: list[float]) -> bool:
        """Whether rounds may go on."""
        if not self._may_go_on(now, wakes) or not self._may_begin(now, wakes):
            return False
        self._opened = True
        return True

    def _may_go_on(self, now: float, wakes: list[float]) -> bool:
        if not self.returning or self._back_by is None:
            return True
        until = self._back_by - max(0.0, self.settings.patience_s - RETURN_S)
        wakes.append(until)
        return now >= until

    def _may_begin(self, now: float, wakes: list[float]) -> bool:
        if not self.settings.synchronous or self._opened:
            return True
        self._started_at = self._started_at or now
        live, late_at = self.members.live(), self._started_at + self.settings.assemble_s
        seen = self.members.learners.values()
        known, drained = sum(not one.closed for one in seen), sum(one.closed and one.was_asked for one in seen)
        if self._everybody:
            awaited = self.settings.learners
        else:
            awaited = self.settings.learners - drained if self.rounds.next == 0 else known
        wakes.append(late_at)
        return len(live) >= awaited or (now >= late_at and bool(live))
