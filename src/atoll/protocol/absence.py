"""Fate of the steps that a learner makes while it is cut off from the syncer.

Its life stays open until `abandon_s`. If it is back by then, its adoption rule decides: carry keeps the steps for the
coming rounds, the other rules drop them with each version that it missed. Later its life is closed, and none of them
counts. The learner says so in its log when it is connected again, the syncer in an event (syncer/returning.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEEPS_ALL = "carry"
"""Adoption rule that drops no steps."""


@dataclass(frozen=True, slots=True)
class AbsenceOutcome:
    """Steps of an absence by what becomes of them, as means over the fragments."""

    steps: int
    merged: float
    dropped: float
    missed: int
    """Number of fragments of which it missed a version."""
    fragments: int
    """Number of all fragments."""

    @property
    def kept(self) -> float:
        return max(0.0, self.steps - self.merged - self.dropped)


def find_outcome(
    steps: int, given: Sequence[int], behind: Sequence[bool], adopt: str, overwritten: Sequence[float] = ()
) -> AbsenceOutcome:
    """Return the fates of the steps. Per fragment, `given`: steps that were merged meanwhile, for what was on its way
    when the link broke may have been; `behind`: whether it missed a version; `overwritten`: steps that it reports as
    dropped already."""
    merged, dropped = 0, 0.0
    for fragment, missed in enumerate(behind):
        own = max(0, min(steps, given[fragment]))
        merged += own
        if missed and adopt != KEEPS_ALL:
            dropped += steps - own
        elif overwritten:
            dropped += min(steps - own, overwritten[fragment])
    count = len(behind)
    return AbsenceOutcome(steps, merged / count, dropped / count, sum(behind), count)


def describe_outcome(found: AbsenceOutcome, adopt: str) -> str:
    """Return the fates that are not zero, and why steps are dropped. A round that asks before a version is adopted may
    save some."""
    at_most = "" if adopt == KEEPS_ALL else "up to "
    fates = (("kept", "", found.kept), ("merged", "", found.merged), ("dropped", at_most, found.dropped))
    named = [f"{word}{count:,.0f} are {fate}" for fate, word, count in fates if count >= 0.5]
    why = _why_dropped(found, adopt)
    return (", ".join(named) or "none is kept or dropped") + (f", because {why}" if why else "")


def _why_dropped(found: AbsenceOutcome, adopt: str) -> str:
    if found.dropped < 0.5:
        return ""
    if adopt == KEEPS_ALL:
        return "versions that it fetched before overwrote them"
    of = f"{found.missed} of {found.fragments} fragments"
    return f"adopt = {adopt} drops them with the versions that it missed of {of}"
