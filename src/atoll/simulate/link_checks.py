"""The overlap is at its floor once links are steady: no contribution and no version waits in a queue.

    floor = ⌈(latency + a body up + a body down + merge + disk) / step⌉ + the boundary

A version may wait behind one that queues for `HEADROOM_ROUNDS` longer: the interval counts whole versions, and one more
or less is none that queues, so it drains by the headroom alone.

The floor follows from the links as they are set, not from what the machines measure. Checked is every contribution of a
learner that takes part in every round, if it was read so many cycles after the last change of a link, of the roster,
of H or of the term, in worlds without faults. A round waits for its members, so the way up is that of the slowest of
them; learners with a share count among them where there is one fragment, since nobody can be asked ahead there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from atoll.protocol.learner.ways import RECENT
from atoll.protocol.syncer.interval import HEADROOM
from atoll.simulate.oracle import Violation
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer

STEADY_CYCLES = 3
"""Cycles of P rounds after a change: two in which the rules follow it, and one that begins without a queue."""
HEADROOM_ROUNDS = ceil(1 / (HEADROOM - 1))
"""Rounds in which a version that queues drains by the headroom of the interval."""
ALIKE = 1.2
"""Slowest over quickest step up to which overlaps are checked: a quick learner waits for the slow ones' boundaries."""
TOLERANCE = 2
"""Steps above the floor."""


class LinkChecks:
    def __init__(
        self,
        learners: Mapping[str, SimulatedLearner],
        link_seconds: Callable[[str], tuple[float, float]],
        *,
        fixed_s: float,
    ) -> None:
        """`link_seconds`: what a contribution and a version of a learner take on its links; (0, 0): it has none.
        `fixed_s`: messages of a round, merge and disk."""
        self._learners, self._link_seconds, self._fixed_s = learners, link_seconds, fixed_s
        self._seen: tuple[object, ...] = ()
        """Links, roster, shares and H at the last commit."""
        self._changed_at = 0
        """Round at which one of them was another than at the round before."""
        self._is_calm = True
        self._last_round: dict[tuple[str, int], int] = {}
        """Round by learner and fragment that its contribution was last in."""
        self.checked = 0
        """Contributions whose overlap was held against the floor."""

    def watch_fault(self) -> None:
        """Check nothing from now on: how long a fault is felt after its end depends on what it did."""
        self._is_calm = False

    def watch_commit(self, syncer: SimulatedSyncer, data: Any) -> None:
        """Check the overlaps that a round's note tells."""
        machine, number, fragment = syncer.machine, data["round"], data["fragment"]
        settings, stepping = machine.settings, machine.members.stepping_learners()
        ways = {one.name: self._link_seconds(one.name) for one in stepping}
        seen = (syncer.term, settings, tuple(ways.items()), tuple((one.incarnation, one.share) for one in stepping))
        if seen != self._seen or not self._is_calm or data["attempt"] > 1:
            self._seen, self._changed_at = seen, number
        awaited = [one for one in stepping if one.share == 1.0 or settings.fragments == 1]
        up_s = max((ways[one.name][0] for one in awaited), default=0.0)
        steps_s = sorted(self._learners[one.name].step_s for one in stepping)
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
            floor = ceil((self._fixed_s + up_s + down_s) / step_s) + 1
            self.checked += 1
            if member["overlap"] > floor + TOLERANCE:
                said = f"{name} adopts what it gave to round {read_in} {member['overlap']} steps later, not {floor}"
                raise Violation("overlap is at its floor", said, name, fragment)
