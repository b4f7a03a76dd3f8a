"""How long what a peer says may be, and how large its numbers, by their types: checked while it is read.

Every text, every row and every number of a message, a tape or a score has one of these; a test walks the types and
finds none without. NaN and infinities are within no bounds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import Annotated, Literal

from msgspec import Meta

LONGEST = 64
"""Characters of the name of a learner, a session, a process or a token."""
ALLOWED = f"use 1 to {LONGEST} of a-z, A-Z, 0-9, '.', '_' and '-', with a letter or a digit first"
"""Names become parts of paths and addresses as they are, so none begins with a dot or a dash: `..` is no learner, and
no file is hidden or taken for an option."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")

MAX_COUNTER = 2**48
"""Counters stay below it, so that sums of them over a run's learners fit everywhere they are written down."""
FAR = 1e30
"""The same for what is measured; a loss beyond it is as good as none."""
LINE = 1000
MANY = 65536
"""Fragments, tensors, leases or members in one message."""

Number = Annotated[int, Meta(gt=-MAX_COUNTER, lt=MAX_COUNTER)]
"""What a peer counts. Which of them may be below zero: protocol/syncer/contributions.py."""
Count = Annotated[int, Meta(ge=0, lt=MAX_COUNTER)]
Real = Annotated[float, Meta(gt=-FAR, lt=FAR)]
Seconds = Annotated[float, Meta(ge=0, lt=float(MAX_COUNTER))]
Name = Annotated[str, Meta(max_length=LONGEST)]
ChoiceName = Annotated[str, Meta(pattern="^[a-z0-9-]+$", max_length=32)]
"""Of a piece of code that does the arithmetic: a codec, an adoption rule, a plan. The rules only pass it on."""
ChoiceNameOrNone = Annotated[str, Meta(pattern="^[a-z0-9-]*$", max_length=32)]
"""Name of such a piece of code; empty: the run's other settings decide."""
Direction = Literal["min", "max"]
"""Which values of a metric are better: small ones or large ones."""
Line = Annotated[str, Meta(max_length=LINE)]
"""What a learner says in words: what it says may be kept, and is to stay small."""
Words = Annotated[str, Meta(max_length=8 * LINE)]
"""What the syncer says: a few lines of learners may be in it."""
Row = Annotated[tuple[Number, ...], Meta(max_length=MANY)]
"""A number for each fragment, or for each of something else."""


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def near(value: float | None) -> float | None:
    """The value, if it is a number that may be sent."""
    return value if value is not None and -FAR < value < FAR else None


def clipped(text: str, most: int = LINE) -> str:
    """The text, or its beginning where there is more of it than may be kept."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


FEW = 256
"""So many are remembered before those that have all of theirs again are forgotten."""


class Budget:
    """What somebody may cost: so much at once, and so much a second after that.

    The time is whoever asks's own: seconds, or a count of rounds. Where it goes back, nothing is given and nothing
    taken.
    """

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst, self._rate = burst, rate
        self._left, self._at = burst, now

    def left(self, now: float) -> float:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left

    def take(self, now: float, amount: float) -> bool:
        """Whether there was so much; if not, nothing is taken."""
        if self.left(now) < amount:
            return False
        self._left -= amount
        return True

    def spend(self, now: float, amount: float) -> None:
        """Also more than there is: it must then be earned before anything is left again."""
        self._left = self.left(now) - amount

    def whole(self, now: float) -> bool:
        return self.left(now) >= self._burst


class Budgets:
    """One for each of those that cost something."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._of: dict[Hashable, Budget] = {}
        self._look_at = FEW

    def take(self, whose: Hashable, now: float, amount: float) -> bool:
        return self._budget(whose, now).take(now, amount)

    def spend(self, whose: Hashable, now: float, amount: float) -> None:
        self._budget(whose, now).spend(now, amount)

    def any_left(self, whose: Hashable, now: float) -> bool:
        return whose not in self._of or self._of[whose].left(now) > 0

    def _budget(self, whose: Hashable, now: float) -> Budget:
        if (budget := self._of.get(whose)) is None:
            self._forget(now)
            budget = self._of[whose] = Budget(self._burst, self._rate, now)
        return budget

    def _forget(self, now: float) -> None:
        """Who has all of it again is as one that never came."""
        if len(self._of) >= self._look_at:
            self._of = {whose: budget for whose, budget in self._of.items() if not budget.whole(now)}
            self._look_at = max(FEW, 2 * len(self._of))


class SharedBytes:
    """Memory that tokens share. One may have as much of it as is left for all others, so half of all where it is alone,
    and no token leaves the others nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_token: Counter[str] = Counter()

    def take(self, token: str, size: int) -> bool:
        if size and self._by_token[token] + size > self._most - self._by_token.total():
            return False
        self._by_token[token] += size
        return True

    def give_back(self, token: str, size: int) -> None:
        self._by_token[token] -= size
        if not self._by_token[token]:
            del self._by_token[token]
