"""What of a learner's tokens counts towards the run's budget: what it reports, up to what is plausible.

One false report could spend the whole budget. So tokens are counted at a believed rate: `MAX_RATIO_NEW` times that of
the median of the others, or the whole budget in `LEAST_S`, whichever is more. What a learner says beyond that counts
later, as time passes, and is never taken back. So a run is counted to the token, however unlike its learners are,
unless one that is far faster than all others would end it in less than that time; then it may last so long. Nobody ends
it sooner by numbers, nor keeps it from ending by being slow.

Rules kept here, each with its test: whoever is alone is believed; while the others are there and have shown nothing
yet (a first step may take minutes), the budget lasts `LEAST_S`; a learner that reports in bursts, or after a time
without a connection, is believed; no number of reports is worth more than the time that they took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.protocol.syncer.claims import MAX_RATIO_NEW, Usual

BUCKET_S = 60.0
"""Credit is kept for at most this long, or for the whole time since its last report if that is longer."""
LEAST_S = 3600.0
"""The word of one learner alone spends a budget in no less than this."""


@dataclass(slots=True)
class Counted:
    """Of one training process, since `began_at`."""

    tokens: int = 0
    """Tokens counted towards the budget."""
    began_at: float = 0.0
    at: float = 0.0
    """When its credit was last made up."""
    credit: float = 0.0
    """Tokens that it would be believed besides."""
    before: int = 0
    """Of `tokens`: what an earlier term had counted by `began_at`. How long they took nobody here knows."""

    def begin(self, now: float) -> None:
        """It is heard of in this term, for the first time or again."""
        if not self.at:
            self.began_at = self.at = now

    def add(self, now: float, total: int, believed: Callable[[], float | None]) -> None:
        """A report names `total`. `believed`: tokens a second (None: all of them), asked for only where needed."""
        if total - self.tokens > self.credit:
            rate, elapsed_s = believed(), now - self.at
            if rate is None:
                self.tokens, self.at = total, now
                return
            self.credit = min(self.credit + rate * elapsed_s, rate * max(BUCKET_S, elapsed_s))
            self.at = now
        more = min(total - self.tokens, int(self.credit))
        self.tokens, self.credit = self.tokens + more, self.credit - more

    @property
    def rate(self) -> float:
        """Tokens a second that were believed; 0 before there are any."""
        return (self.tokens - self.before) / (self.at - self.began_at) if self.at > self.began_at else 0.0


@dataclass(slots=True)
class Alone:
    """What one learner says it did while it alone made steps, though others were to be back. Its steps count at a
    believed rate for the time that it was alone; the rest counts once the others have shown a rate that allows it."""

    steps: float = 0.0
    seconds: float = 0.0
    counted: float = 0.0
    """Of `steps`."""

    def count(self, rate: float) -> None:
        """`rate`: steps a second that are believed. What of the time is not needed is kept, as credit is."""
        self.counted = max(self.counted, min(self.steps, rate * self.seconds))
        if self.counted == self.steps > 0:
            left_s = max(0.0, self.seconds - self.counted / rate)
            self.steps, self.seconds, self.counted = 0.0, min(left_s, BUCKET_S), 0.0


def believed_rate(others: list[float], budget: int, ratio: float = MAX_RATIO_NEW) -> float:
    """`others`: their rates, as far as they have shown any; of two the lower one counts."""
    usual = sorted(others)[(len(others) - 1) // 2] if others else 0.0
    return max(ratio * usual, budget / LEAST_S)


def rate_of(counted: Counted, usual: Usual) -> float | None:
    """What a learner shows the others: what was believed of it, or else what it says; None: it made no step yet."""
    if counted.rate > 0:
        return counted.rate
    moved = usual.began_at is not None and usual.at > usual.began_at and usual.tokens > 0
    return usual.per_second if moved else None
