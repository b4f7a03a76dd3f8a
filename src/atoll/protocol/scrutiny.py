"""Whether a learner is believed: its reports and contributions held against what the syncer knows (claims.py)."""

from __future__ import annotations

from atoll.protocol.accounts import Accounts
from atoll.protocol.claims import STEPS, above_others, beyond_declared, beyond_rate, beyond_steps
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Contribution, Progress


class Scrutiny:
    def __init__(self, members: Membership, accounts: Accounts) -> None:
        self._members, self._accounts = members, accounts

    def report(self, now: float, learner: Learner, said: Progress) -> str | None:
        """What it claims beyond what it can have, in one line."""
        if (wrong := self._accounts.beyond_lease(learner, said.position, learner.position)) is not None:
            return wrong
        return self._beyond_rate(now, learner, said.t, said.tokens_total)

    def contribution(self, now: float, learner: Learner, given: Contribution) -> str | None:
        """Its copy may be older than the last report, or newer."""
        before = learner.position if given.t >= learner.t else -1
        wrong = self._accounts.beyond_lease(learner, given.position, before)
        wrong = wrong or self._beyond_rate(now, learner, given.t, given.total)
        wrong = wrong or self._accounts.beyond_ledger(learner, given)
        wrong = wrong or beyond_declared(given.steps, given.tokens, learner.declared)
        others = self._members.per_step(learner)
        if wrong is not None or not others:
            return wrong  # alone, it is weighed against nobody
        return beyond_steps(given.steps, given.tokens, learner.usual, others)

    def above(self, learner: Learner) -> str | None:
        """Whether its steps have far more tokens than the others'; looked at every `STEPS` of its steps."""
        if not learner.usual.known or learner.t < learner.compared_at:
            return None
        learner.compared_at = learner.t + STEPS
        return above_others(learner.usual.per_step, self._members.per_step(learner))

    def _beyond_rate(self, now: float, learner: Learner, t: int, total: int) -> str | None:
        usual = learner.usual
        if usual.began_at is not None:
            wrong = beyond_declared(t - usual.t, total - usual.total, learner.declared)
            if wrong is not None:
                return wrong
        return beyond_rate(now, t, total, learner.usual, self._members.per_step(learner))
