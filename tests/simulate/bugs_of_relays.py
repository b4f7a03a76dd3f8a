"""Planted bugs of relays: whom a sum counts, what a relay still holds, whose feedback is taken over."""

from __future__ import annotations

from typing import Any

from tests.simulate.planting import Plain, always, mutant

from atoll.protocol import relay
from atoll.protocol.messages import ContributionKey
from atoll.protocol.relay import RelayHoldings, SumAsked, SumGathering


def _keep_earlier(plain: Plain) -> Any:
    """What came to an earlier attempt of the round is kept …"""

    def broken(self: RelayHoldings, learner: str, round: int, attempt: int, fragment: int) -> list[ContributionKey]:
        self.expected[learner, round, attempt] = fragment
        return []

    return broken


def _all_of_round(plain: Plain) -> Any:
    """… and summed with the later one."""

    def broken(self: RelayHoldings, asked: SumAsked) -> list[ContributionKey]:
        plain(self, asked)
        wanted = {member.learner for member in asked.members}
        return [key for key in self.held if key[0] in wanted and key[1] == asked.round]

    return broken


mutant(
    "a relay counts a learner twice",
    (RelayHoldings, "expect_body", _keep_earlier),
    (RelayHoldings, "find_members", _all_of_round),
    (RelayHoldings, "forget_body", lambda plain: lambda self, key: self.expected.pop(key, None)),
    (relay, "wrong_sum", always("")),
    kind="relays",
)


def _pass_over_lost(plain: Plain) -> Any:
    def broken(self: SumGathering, round: int, fragment: int, rule: str, members: Any) -> Any:
        return plain(self, round, fragment, rule, [one for one in members if one[0] in self.held])

    return broken


mutant(
    "a member whose relay is gone is left out of its round's sum",
    (SumGathering, "ask_sums", _pass_over_lost),
    kind="relays",
)


def _settle_all(plain: Plain) -> Any:
    def broken(self: SumGathering, round: int, *, merged: bool) -> Any:
        return plain(self, round, merged=True)

    return broken


mutant(
    "a relay is told of a round that came to nothing as if it were committed",
    (SumGathering, "end_round", _settle_all),
    kind="relays",
)
