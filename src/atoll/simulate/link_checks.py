"""Invariant of worlds with links: the overlap is at its floor once links are steady, so nothing waits in a queue.

    floor = ⌈schedule.least_overlap_s / step⌉ + the boundary

The formula is that of docs/protocol.md, "The floor of the overlap". The boundary is the step by which learners are out
of phase. The floor follows from the links as they are set, not from what the state machines measure. A contribution is
checked if

- its learner takes part in every round;
- it was read at least STEADY_CYCLES cycles after the last change of a link, of the roster, of H or of the term;
- its world had no fault so far.

A round waits for its members, so the way up is that of the slowest of them. With a single fragment, learners with a
share count among them, since no learner can be asked ahead there.

For the first HEADROOM_ROUNDS rounds of that, a version may wait behind one other. The interval grows for queues of
whole versions (`RoundInterval._drain_share`); a queue of less than one drains by the headroom alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from atoll.protocol import schedule
from atoll.protocol.learner.ways import RECENT
from atoll.protocol.syncer.interval import HEADROOM
from atoll.simulate.oracle import Violation
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer

STEADY_CYCLES = 3
"""Cycles of P rounds after a change: two in which the rules follow it, and one that begins without a queue."""
HEADROOM_ROUNDS = ceil(1 / (HEADROOM - 1))
"""Rounds in which one queued version drains by the headroom of the interval."""
ALIKE = 1.2
"""Largest ratio of the slowest learner's step to the quickest's at which overlaps are checked: a quick learner waits
for the boundaries of slow ones."""
TOLERANCE = 2
"""Steps above the floor."""


class LinkChecks:
    def __init__(
        self,
        learners: Mapping[str, SimulatedLearner],
        link_seconds: Callable[[str], tuple[float, float]],
        *,
        one_way_s: float,
        work_s: float,
        crossings: int = schedule.CROSSINGS,
    ) -> None:
        """`link_seconds`: seconds that a contribution and a version take on a learner's links; (0, 0): it has none.
        `work_s`: seconds that merge and disk take."""
        self._learners, self._link_seconds = learners, link_seconds
        self._one_way_s, self._work_s, self._crossings = one_way_s, work_s, crossings
        self._seen: tuple[object, ...] = ()
        """Links, roster, shares and H at the last commit."""
        self._changed_at = 0
        """Last round at which one of them differed from the round before."""
        self._is_calm = True
        self._last_round: dict[tuple[str, int], int] = {}
        """Last round with a contribution of a learner to a fragment, keyed by both."""
        self.checked = 0
        """Number of contributions whose overlap was compared with the floor."""

    def watch_fault(self) -> None:
        """Check nothing from now on: how long the effects of a fault last depends on the fault."""
        self._is_calm = False

    def watch_commit(self, syncer: SimulatedSyncer, data: Any) -> None:
        """Check the overlaps in the event of a round."""
        machine, number, fragment = syncer.machine, data["round"], data["fragment"]
        settings, stepping = machine.settings, machine.members.stepping_learners()
        ways = {learner.name: self._link_seconds(learner.name) for learner in stepping}
        lives = tuple((learner.incarnation, learner.share) for learner in stepping)
        seen = (syncer.term, settings, tuple(ways.items()), lives)
        if seen != self._seen or not self._is_calm or data["attempt"] > 1:
            self._seen, self._changed_at = seen, number
        awaited = [learner.name for learner in stepping if learner.share == 1.0 or settings.fragments == 1]
        up_s = max((ways[name][0] for name in awaited), default=0.0)
        steps_s = sorted(self._learners[learner.name].step_s for learner in stepping)
        alike = bool(steps_s) and steps_s[-1] <= ALIKE * steps_s[0]
        for member in data["members"]:
            name = member["learner"]
            read_in = self._last_round.get((name, fragment), -1)
            self._last_round[name, fragment] = number
            steady = read_in >= self._changed_at + max(STEADY_CYCLES * settings.fragments, 2 * RECENT)
            if not steady or not alike or member["overlap"] is None or name not in ways or not ways[name][1]:
                continue
            if settings.synchronous or machine.state.draining or machine.members.learners[name].share < 1.0:
                continue
            step_s = self._learners[name].step_s
            drained = read_in >= self._changed_at + STEADY_CYCLES * settings.fragments + HEADROOM_ROUNDS
            down_s = ways[name][1] if drained else 2 * ways[name][1]
            floor_s = schedule.least_overlap_s(self._one_way_s, up_s, down_s, self._work_s, self._crossings)
            floor = ceil(floor_s / step_s) + 1
            self.checked += 1
            if member["overlap"] > floor + TOLERANCE:
                said = f"{name} adopts what it gave to round {read_in} {member['overlap']} steps later, not {floor}"
                raise Violation("overlap is at its floor", said, name, fragment)
