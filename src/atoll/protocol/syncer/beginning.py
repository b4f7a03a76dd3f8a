"""Training of a new run begins once every learner of the first roster holds version 0.

The first roster is made of the processes that are connected when the run gets its first parameters (joining.py).
Otherwise the learner that gave them would train alone while the others fetch: over a narrow link, for a minute.

Rules kept here, each with its test:
- no learner makes a step, and no round opens, before the whole roster holds version 0;
- a learner is no longer waited for once its missing bytes have not become fewer for `join_stall_s`, or once it takes
  longer than all bytes would at LEAST_RATE: no claim holds the others up for ever;
- a learner that is not connected is not waited for, unless the same process comes back before training begins;
- a learner that joins meanwhile is held back until training begins, but the others do not wait for it;
- a learner that connects later learns from its welcome that training has begun;
- a new term holds no learner back: with its welcome, each learner that holds the parameters may begin.
"""

from __future__ import annotations

from math import inf

from atoll.protocol.messages import TrainingBegins
from atoll.protocol.syncer.downloads import parameter_bytes
from atoll.protocol.syncer.ending import Assembly
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

LEAST_RATE = 32 * 1024
"""Bytes per second. The fabric gives up a slower body, so an honest download is faster."""


class Beginning:
    def __init__(self, state: SyncerState, assembly: Assembly) -> None:
        self.state, self.assembly = state, assembly
        self._roster: dict[str, str] | None = None
        """Sessions of the learners that are waited for, keyed by name. None: there are none."""
        self._started_at = 0.0

    @property
    def holds_back(self) -> bool:
        """Whether no learner may make a step yet: the run has no parameters, or its first roster is waited for."""
        return self.state.phase == "empty" or self._waits_for_roster

    @property
    def _waits_for_roster(self) -> bool:
        return self.state.phase == "running" and self._roster is not None

    @property
    def awaited(self) -> list[KnownLearner]:
        """Connected learners of the roster that do not hold version 0 yet."""
        if not self._waits_for_roster or self._roster is None:
            return []
        roster, connected = self._roster, self.state.members.connected_learners()
        return [
            learner for learner in connected if roster.get(learner.name) == learner.session and not _holds_all(learner)
        ]

    def hold_back(self, now: float, owner: KnownLearner | None) -> None:
        """Hold all learners back, now that the run has its first parameters. `owner` gave them and fetches nothing."""
        self._started_at = now
        self._roster = {}
        for learner in self.state.members.connected_learners():
            learner.download.moved_at = now
            if learner is not owner:
                self._roster[learner.name] = learner.session

    def begin_if_ready(self, now: float, wakes: list[float]) -> None:
        """Let training begin, unless a learner is waited for."""
        if not self._waits_for_roster or self._roster is None:
            return
        given_up = []
        for learner in self.awaited:
            until = self._waits_until(learner)
            if now < until:
                wakes.append(until)
            else:
                given_up.append(learner)
        for learner in given_up:
            del self._roster[learner.name]
            stall_s = self.state.settings.join_stall_s
            stalled = now >= learner.download.moved_at + stall_s
            why = f"has not moved for {stall_s:g} s" if stalled else "takes too long"
            text = f"training does not wait for {learner.name}: its download of version 0 {why}"
            self.state.out.note("warning", text, learner, lacking_bytes=learner.download.lacking)
        if not self.awaited:
            self._begin(now, "not all hold version 0" if given_up else "every learner that is here holds version 0")

    def _waits_until(self, learner: KnownLearner) -> float:
        whole = parameter_bytes(self.state.history.begun.tensors)
        longest_s = self.state.settings.join_stall_s + whole / LEAST_RATE if whole else inf
        return min(learner.download.moved_at + self.state.settings.join_stall_s, self._started_at + longest_s)

    def _begin(self, now: float, reason: str) -> None:
        self._roster = None
        self.assembly.note_start(now)
        for learner in self.state.members.connected_learners():
            learner.idle_at = learner.last_step_at = now  # no average of step times may include the wait
            self.state.out.send(learner.name, TrainingBegins(reason=reason))
        waited_s = round(now - self._started_at, 3)
        after = f" after {waited_s:.1f} s" if waited_s >= 1.0 else ""
        self.state.out.note("begun", f"training begins{after}: {reason}", seconds=waited_s)

    def put_off(self, now: float, seconds: float) -> None:
        """Count no time in which the syncer itself heard nothing."""
        self._started_at = min(now, self._started_at + seconds)


def _holds_all(learner: KnownLearner) -> bool:
    return bool(learner.versions) and min(learner.versions) >= 0
