"""Whose a learner's name is: the token's that it came by, from then on and for as long as that token counts.

A name is never forgotten, also when its learner has left: each is an entry in the run's journal and in the syncer's
memory, so a token may bring only so many (`Token.names`). The journal keeps all of it (`protocol.records.Owned`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Owners:
    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        """`known`: names and their tokens, as the journal has them."""
        self._token_of = dict(known or {})
        self._names = Counter(self._token_of.values())

    def of(self, learner: str) -> str:
        """The token that a name belongs to; empty: nobody's yet."""
        return self._token_of.get(learner, "")

    def names(self, token: str) -> int:
        """How many it has brought so far, those that have left included."""
        return self._names[token]

    def take(self, learner: str, token: str) -> None:
        """Nothing is owned where nobody is asked for a token."""
        if not token or (before := self.of(learner)) == token:
            return
        self._token_of[learner] = token
        self._names[token] += 1
        if before:
            self._names[before] -= 1
