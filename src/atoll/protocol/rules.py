"""What a learner's report or contribution must keep to; each function says what is wrong with it, or None."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

from atoll.protocol.membership import Learner
from atoll.protocol.messages import Contribution, Progress
from atoll.protocol.round import Round

MOST = 2**48
"""Counters stay below it, so that sums of them over a run's learners fit everywhere they are written down."""


def wrong_report(learner: Learner, report: Progress, versions: Sequence[int]) -> str | None:
    """An honest learner never sends such a report: its channel is closed."""
    fragments = len(versions)
    rows = (report.steps, report.tokens, report.versions, report.dropped, report.counted)
    if {*map(len, rows)} != {fragments}:
        return f"a report of {len(report.steps)} fragments in a run of {fragments}"
    counted = (report.steps, report.tokens, report.dropped, (report.t, report.tokens_total))
    if min(map(min, counted)) < 0:
        return "a report with counters below zero"
    if max(map(max, counted)) >= MOST or report.position >= MOST:
        return "a report with counters that no run reaches"
    if report.t < learner.t or report.tokens_total < learner.tokens_total:
        return f"its counters went back: step {report.t} after step {learner.t}"
    if any(map(gt, report.versions, versions)):
        return "a report of versions that this run never committed"
    return None


def not_its_own(learner: Learner, given: Contribution, run: str, term: int) -> str | None:
    """Whether a contribution was meant for another run, life or reign than the channel's that it came on.

    Version 1 names neither run nor life. Who was welcomed knows the term: whoever is asked has heard of it.
    """
    if learner.protocol > 1:
        said, own = (given.run, given.learner, given.incarnation), (run, learner.name, learner.incarnation)
        if said != own:
            return f"it is of {_life(*said)}, this channel of {_life(*own)}"
    return f"it is of term {given.term}, the run is in term {term}" if given.term != term else None


def _life(run: str, learner: str, incarnation: int) -> str:
    return f"{learner or 'nobody'} (incarnation {incarnation}) in run {run or 'none'}"


def against_the_rules(learner: Learner, round_: Round, given: Contribution, newest: int) -> str | None:
    """Why a contribution may not be merged."""
    least = learner.merged[round_.fragment]
    if given.fragment != round_.fragment:
        return f"it is fragment {given.fragment}, the round takes {round_.fragment}"
    if not 0 <= given.base <= newest:
        return f"its base is version {given.base}, which this run never committed"
    if given.base < least:
        return f"its base is version {given.base}, but version {least} already contains its steps"
    if given.steps < 0 or given.tokens < 0:
        return f"its counters are below zero: {given.steps} steps, {given.tokens} tokens"
    if max(given.t, given.steps, given.tokens, given.total, given.position) >= MOST:
        return "its counters are such as no run reaches"
    return None
