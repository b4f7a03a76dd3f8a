"""What of a learner's tokens counts towards the run's budget: what it says, as far as that can be.

A report could end a run by one number. So tokens are counted at a rate that is believed: `TIMES_NEW` times that of the
median of the others, or twice what was believed of its own so far, whichever is more. What it says beyond that counts
later, as time passes, and is never taken back: an honest learner that is much faster than all others is behind in the
budget for a while, and then is not.

Rules kept here, each with its test: whoever is alone is believed; while the others have shown nothing yet, nothing
counts, for a patience; a learner that reports in bursts, or after a time without a line, is believed; no number of
reports is worth more than the time that they took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.protocol.claims import TIMES_NEW, Usual

BUCKET_S = 60.0
"""So much of the time behind it a learner may make use of at once; of a longer silence all of it."""
OWN = 2.0
"""Times its own rate, as it was believed so far, over a bucket at least: it grows with the time, not at once."""


@dataclass(slots=True)
class Counted:
    """Of one training process, since `began_at`."""

    tokens: int = 0
    """They count."""
    began_at: float = 0.0
    at: float = 0.0
    """When its credit was last made up."""
    credit: float = 0.0
    """Tokens that it would be believed besides."""

    def add(self, now: float, total: int, others: Callable[[], float | None]) -> None:
        """A report names `total`. `others`: the rate that is usual (None: it is alone), asked for only where needed."""
        if total - self.tokens > self.credit:
            usual = others()
            if usual is None:
                self.tokens, self.at = total, now
                return
            own, elapsed_s = self.tokens / max(BUCKET_S, self.at - self.began_at), now - self.at
            rate = max(TIMES_NEW * usual, OWN * own)
            self.credit = min(self.credit + rate * elapsed_s, rate * max(BUCKET_S, elapsed_s))
            self.at = now
        more = min(total - self.tokens, int(self.credit))
        self.tokens, self.credit = self.tokens + more, self.credit - more

    @property
    def rate(self) -> float:
        """Tokens a second that were believed; 0 before there are any."""
        return self.tokens / (self.at - self.began_at) if self.at > self.began_at else 0.0


def rate_of(counted: Counted, usual: Usual) -> float | None:
    """What a learner shows the others: what was believed of it, or else what it says; None: it made no step yet."""
    if counted.rate > 0:
        return counted.rate
    moved = usual.began_at is not None and usual.at > usual.began_at and usual.tokens > 0
    return usual.per_second if moved else None
