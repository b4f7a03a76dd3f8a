"""What a learner answers to a pull: a copy that lies ready, one that the next boundary brings, or why there is none;
and which copies it therefore orders ahead.

Rules kept here, each with its test: nothing is contributed before it has recovered; a pull is declined while the
version that holds this learner's last contribution is not adopted; a copy on another base than the model's is no use;
after the last step nothing older than it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from atoll.protocol.copies import Copies
from atoll.protocol.effects import Copied, Drop, LearnerEffect, Uploaded, UploadFailed
from atoll.protocol.messages import Decline, FromLearner, Pull
from atoll.protocol.orders import Orders
from atoll.protocol.versions import Versions


class Standing(NamedTuple):
    """Where the learner stands now."""

    t: int
    steps: tuple[int, ...]
    stepping: bool
    """More boundaries will come."""
    recovered: bool


class Pulls:
    def __init__(
        self,
        do: Callable[[LearnerEffect], None],
        say: Callable[[float, FromLearner], None],
        standing: Callable[[], Standing],
        orders: Orders,
        copies: Copies,
        versions: Versions,
    ) -> None:
        self._do, self._say, self._standing = do, say, standing
        self._orders, self._copies, self._versions = orders, copies, versions

    @property
    def _synchronous(self) -> bool:
        return self._orders.settings.synchronous

    def pull(self, now: float, pull: Pull) -> None:
        fragment = pull.fragment
        if not self._standing().recovered:
            self._decline(now, pull, "it has not recovered yet")
        elif (owed := self._versions.owed(fragment)) is not None:
            self._decline(now, pull, f"version {owed}, which holds its last steps, is not adopted yet")
        elif self._is_at_hand(fragment):
            self._answer(now, pull)
        elif not pull.probe and self._nothing_comes(fragment):
            self._decline(now, pull, "no steps since its last adoption")
        else:
            self._copies.waiting[fragment] = pull
            self._orders.order(pull.round, self._standing().t)

    def copied(self, now: float, copy: Copied) -> bool:
        """A copy was made. True: it is to be reported, since (synchronous) it is what the round waits for."""
        ordered = self._orders.pending.pop(copy.round, None) is not None
        if not self._is_useful(copy, ordered):
            if self._copies.read_at(copy.fragment) != copy.t:  # else it is the one at hand, ordered for two rounds
                self._do(Drop(copy.fragment, copy.t))
            return False
        if (pull := self._copies.keep(copy)) is None:
            return self._synchronous
        self._answer(now, pull)
        return False

    def delivered(self, now: float, event: Uploaded) -> None:
        if (contribution := self._copies.arrived(event.round, event.attempt, event.digest)) is not None:
            self._say(now, contribution)

    def undelivered(self, now: float, event: UploadFailed) -> None:
        if self._copies.failed(event.round, event.attempt, keep=self._synchronous):
            reason = f"its answer did not arrive: {event.reason}"
            self._say(now, Decline(round=event.round, attempt=event.attempt, reason=reason))

    def order_waited_for(self, step: int) -> None:
        """A copy that did not do, for a pull that waits, is made again."""
        for pull in self._copies.waiting.values():
            if pull.round not in self._orders.pending:
                self._orders.order(pull.round, step)

    def pass_boundary(self) -> None:
        """A step was reported: what the next boundary copies is ordered now."""
        self._orders.pass_boundary(self._standing().t)
        self._order_ahead()

    def plan(self) -> None:
        """Orders for a learner that has just recovered or come back."""
        standing = self._standing()
        if standing.stepping and self._synchronous:
            self._orders.align(standing.t)
        else:
            self._order_ahead()

    def move_on(self, gathering: int) -> None:
        """The syncer gathers a later round: aim at its fragment and the ones that follow."""
        if gathering > self._orders.gathering:
            self._orders.move_on(self._standing().t, gathering)
            self._order_ahead()

    def _order_ahead(self) -> None:
        """Asynchronous, and only while it steps: the next boundary's copies."""
        standing = self._standing()
        if standing.stepping and standing.recovered and not self._synchronous:
            self._orders.order_ahead(standing.t, [pull.round for pull in self._copies.waiting.values()])

    def pass_over(self, number: int) -> None:
        """Nothing comes of that round: nobody waits for it, and the copy made for it would only take up room."""
        self._orders.let_go(number)
        self._copies.drop(number % len(self._versions.held), until=number)

    def _is_useful(self, copy: Copied, ordered: bool) -> bool:
        if copy.base < 0 or copy.base != self._versions.held[copy.fragment]:
            return False
        if not self._standing().stepping or copy.fragment in self._copies.waiting:
            return True
        return ordered if self._synchronous else copy.steps > 0

    def _is_at_hand(self, fragment: int) -> bool:
        """A copy that will do. After the last step it is the last chance: only a copy of all steps will."""
        standing = self._standing()
        return fragment in self._copies and (standing.stepping or self._copies.read_at(fragment) >= standing.t)

    def _nothing_comes(self, fragment: int) -> bool:
        """Whether the next boundary would bring no copy with steps in it."""
        standing = self._standing()
        if standing.stepping:
            return self._synchronous
        return not standing.steps or standing.steps[fragment] == 0

    def _answer(self, now: float, pull: Pull) -> None:
        if self._synchronous and self._copies.is_on_its_way(pull):
            return  # the same copy twice: the second would be turned away, and the first be taken for it
        if not self._copies.send(pull):
            self._decline(now, pull, "no steps since its last adoption")

    def _decline(self, now: float, pull: Pull, reason: str) -> None:
        self._say(now, Decline(round=pull.round, attempt=pull.attempt, reason=reason))
