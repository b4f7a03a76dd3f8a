"""The guard on the run's own validation loss: whether its scores say that the model has become worse, and since when.

The limit lies above the best loss by a share of all that the loss has fallen so far, at least by a small share of the
first loss, at most at twice the best; scores that go up and down by more than that set a wider limit of their own. A
score above the limit is *bad*; one in the lower half of the way there is *good*; one between says nothing.

Rules kept here, each with its test: three bad scores in a row raise the alarm, one that is not finite does at once; the
alarm ends with a good score; the round to go back to is the newest with a good score; after going back, scores of
rounds from before count for nothing, and the run is not taken back again before a good score has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import median

import msgspec

IN_A_ROW = 3
"""Bad scores that raise the alarm."""
SHARE = 0.25
"""Of all that the loss has fallen so far: by so much it may rise."""
FLOOR = 0.05
"""Of the first loss: by so much it may rise in any case, since a run that has only begun has not fallen by much."""
NOISE = 4.0
"""Times the usual rise from one good score to the next."""
RECENT = 9
"""Good scores by which the usual rise is known."""


class Trend(msgspec.Struct, frozen=True, array_like=True):
    """What a run's scores say so far: a fold over them."""

    first: float | None = None
    best: float | None = None
    good: int = -1
    """The newest round with a good score; −1: none."""
    recent: tuple[float, ...] = ()
    """Good losses, the newest last."""
    bad: int = 0
    """Bad scores in a row."""
    alarmed: bool = False
    newest: int = -1
    """Scores of rounds before this one come too late …"""
    ignored: int = -1
    """… and those up to this one are of versions that were rolled back."""
    rolled_back: bool = False
    """Rolled back, and no good score since."""

    @property
    def tolerance(self) -> float:
        """By how much a loss may lie above the best one."""
        if self.first is None or self.best is None:
            return 0.0
        allowed = max(SHARE * (self.first - self.best), FLOOR * abs(self.first))
        if self.best > 0:
            allowed = min(allowed, self.best)
        return max(allowed, NOISE * usual_rise(self.recent))

    @property
    def limit(self) -> float:
        """Above it a score is bad."""
        return (self.best or 0.0) + self.tolerance


def usual_rise(losses: Sequence[float]) -> float:
    """The median of the rises from one loss to the next; 0 where they only fall."""
    rises = [after - before for before, after in pairwise(losses) if after > before]
    return median(rises) if rises else 0.0


def counts(trend: Trend, round: int, committed: int) -> bool:
    """Whether a score of that round says something new of a run with so many rounds behind it."""
    return max(trend.newest, trend.ignored + 1, 0) <= round <= committed


def scored(trend: Trend, round: int, loss: float | None) -> Trend:
    """With one more score. None: it is not finite."""
    trend = msgspec.structs.replace(trend, newest=round)
    if loss is None or not isfinite(loss):
        return msgspec.structs.replace(trend, bad=trend.bad + 1, alarmed=True)
    if trend.first is None or trend.best is None:
        return _good(msgspec.structs.replace(trend, first=loss, best=loss), round, loss)
    if loss > trend.limit:
        bad = trend.bad + 1
        return msgspec.structs.replace(trend, bad=bad, alarmed=trend.alarmed or bad >= IN_A_ROW)
    if loss <= trend.best + trend.tolerance / 2:
        return _good(trend, round, loss)
    return trend


def _good(trend: Trend, round: int, loss: float) -> Trend:
    assert trend.best is not None
    recent = (*trend.recent, loss)[-RECENT:]
    fine = msgspec.structs.replace(trend, bad=0, alarmed=False, rolled_back=False)
    return msgspec.structs.replace(fine, best=min(trend.best, loss), good=round, recent=recent)


def rolled_back(trend: Trend, to: int, at: int) -> Trend:
    """The run is as it was after `to` rounds; `at`: so many are behind it."""
    return msgspec.structs.replace(trend, good=to, bad=0, alarmed=False, ignored=at, rolled_back=True)


def target(trend: Trend, committed: int) -> int | None:
    """The round to go back to; None: there is none, or the run was taken back and no good score has come since."""
    if not trend.alarmed or trend.rolled_back or not 0 <= trend.good < committed:
        return None
    return trend.good
