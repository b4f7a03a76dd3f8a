"""What must hold of a learner's ranks, whatever the world does:

all ranks do the same              what one reads, adopts or saves, each does as its next, after the same step
a version is whole in all ranks    what a rank adopts is its part of the committed version, in its place
tokens are those of all ranks      of every step, once: known a step later
a contribution is of one read      its parts are of all ranks, of copies made after one step on one base
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.mailbox.channel import AdoptOrder
from atoll.simulate.cells import Cells, take_part
from atoll.simulate.oracle import Oracle, Violation
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.simulated_rank import SentPart


class RankInvariants:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._done: dict[str, list[str]] = {}
        """By session: what its ranks do, one after the other."""
        self._counts: dict[tuple[str, int], int] = {}
        """How much of it each rank has done."""

    def watch_rank(self, learner: RankedLearner, rank: int, done: str) -> None:
        all_done, key = self._done.setdefault(learner.session, []), (learner.session, rank)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        if count == len(all_done):
            all_done.append(done)
        elif all_done[count] != done:
            said = f"rank {rank} of {learner.name} {done}, where another {all_done[count]}"
            raise Violation("all ranks do the same", said, learner.name)

    def watch_tokens(self, learner: RankedLearner) -> None:
        each = learner.tokens_per_step
        if not (learner.t - 1) * each <= learner.tokens_total <= learner.t * each:
            said = f"{learner.name} counts {learner.tokens_total} tokens after {learner.t} steps of {each}"
            raise Violation("tokens are those of all ranks", said, learner.name)

    def watch_disagreement(self, learner: RankedLearner, error: Exception) -> None:
        """The couriers found out themselves."""
        raise Violation("all ranks do the same", str(error), learner.name) from error

    def watch_rank_adoption(self, learner: RankedLearner, rank: int, order: AdoptOrder) -> None:
        f, plan = order.fragment, learner.plans[rank]
        if not plan.plan.fragments[f].size:
            return
        part, oracle = learner.ranks[rank].incoming.get(order.slot), self._oracle
        lost = [value for (g, version, value) in oracle.never_were if (g, version) == (f, order.version)]
        committed = [oracle.values.get((f, order.version)), *lost]
        if not any(isinstance(one, Cells) and take_part(plan, f, one) == part for one in committed):
            said = f"rank {rank} of {learner.name} adopts {part} as its part of version {order.version}"
            raise Violation("a version is whole in all ranks", f"{said}, committed is {committed[0]}", learner.name, f)

    def watch_parts(self, learner: str, fragment: int, parts: Mapping[int, SentPart]) -> None:
        """A contribution is merged. (What learners sent for two answers may lie together before that: then no message
        names it.)"""
        reads = {part.read for part in parts.values()}
        if len(reads) != 1 or next(iter(reads)).fragment != fragment:
            said = f"a contribution of {learner} is put together of {sorted(map(str, reads))}"
            raise Violation("a contribution is of one read", said, learner, fragment)
