"""The last cycle: when the learners have stopped, one unpaced cycle of P rounds brings their last steps in.

Rounds under way are finished first. A fragment of which nobody has steps left is skipped. Whoever does not stop, or
does not take the version that holds its last contribution, is waited for with a patience, anew after every commit. One
that was muted or stalled is asked too: a training loop that has ended answers at once, however slow its steps were.
Nobody is asked twice, so a moment of silence leaves nobody out: it takes a missed deadline, or a link that is given up.
"""

from __future__ import annotations

from atoll.protocol import schedule
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.rounds import Rounds
from atoll.protocol.settings import Settings


class Drain:
    def __init__(self, settings: Settings, members: Membership, rounds: Rounds) -> None:
        self.settings, self.members, self.rounds = settings, members, rounds
        self._stop_by = 0.0
        self._moved_at = 0.0
        self._seen = 0
        self._until: int | None = None
        """The round after the cycle's last."""

    def begin(self, now: float) -> None:
        self.rounds.stop_gathering()
        self._stop_by = now + self._patience_s()

    def step(self, now: float, wakes: list[float]) -> bool:
        """Open what is to be collected next; True when nothing is left."""
        if self.rounds.committed > self._seen:
            self._seen, self._moved_at = self.rounds.committed, now
        if self.rounds.open or self._waits_for_stops(now, wakes):
            return False
        if self._until is None:
            self._until, self._moved_at = self.rounds.next + self.settings.fragments, now
        while self.rounds.next < self._until:
            fragment = schedule.fragment_of(self.rounds.next, self.settings)
            if self._waits_for_adoption(now, fragment, wakes):
                return False
            if any(one.stopped and one.has_more(fragment) for one in self.members.reachable()):
                self.rounds.open_one(now)
                return False
            self.rounds.skip()
        return True

    def _patience_s(self) -> float:
        """Also the slowest learner comes to its next boundary, and words go to it and back, which takes no longer than
        its answers do. One that has stalled is not waited for longer than a run assembles."""
        most_s = self.settings.assemble_s
        own_s = [min(_needs_s(one), most_s) if one.stalled else _needs_s(one) for one in self.members.reachable()]
        return max(self.settings.patience_s, 4 * (self.members.step_s() or 0.0), *own_s)

    def _waits_for_stops(self, now: float, wakes: list[float]) -> bool:
        wakes.append(self._stop_by)
        return now < self._stop_by and any(not one.stopped for one in self.members.reachable())

    def _waits_for_adoption(self, now: float, fragment: int, wakes: list[float]) -> bool:
        """With adopt = "carry", steps may be left after it."""
        until = self._moved_at + self._patience_s()
        wakes.append(until)
        return now < until and any(not one.may_give(fragment) for one in self.members.reachable())


def _needs_s(one: Learner) -> float:
    """What it takes to tell this learner something, and to hear of it after its next boundary."""
    return 2 * (one.step_s.value or 0.0) + (one.answer_s.value or 0.0)
