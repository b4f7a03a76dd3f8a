"""What a learner's hello, report or contribution must keep to; each function says what is wrong with it, or None."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

from atoll.protocol.bounds import MOST
from atoll.protocol.membership import Learner
from atoll.protocol.messages import Contribution, Hello, Progress
from atoll.protocol.round import Round


def wrong_hello(hello: Hello, run: str, fragments: int) -> str | None:
    """A learner holds a version of every fragment of this run, or of none; of other runs it says what it likes."""
    if hello.tokens_per_step < 0:
        return f"a hello with {hello.tokens_per_step} tokens per step"
    if hello.run != run or len(hello.versions) in (0, fragments):
        return None
    return f"a hello with versions of {len(hello.versions)} fragments in a run of {fragments}"


def wrong_report(learner: Learner, report: Progress, versions: Sequence[int]) -> str | None:
    """An honest learner never sends such a report: its channel is closed."""
    fragments = len(versions)
    rows = (report.steps, report.tokens, report.versions, report.dropped, report.counted)
    if {*map(len, rows)} != {fragments}:
        return f"a report of {len(report.steps)} fragments in a run of {fragments}"
    if report.missed and (len(report.missed) != fragments or any(map(gt, report.missed, report.dropped))):
        return "a report in which more was missed than dropped"
    counted = (report.steps, report.tokens, report.dropped, report.missed or (0,), (report.t, report.tokens_total))
    places = (report.versions, report.counted, (report.offer, report.aims, report.position))
    if min(map(min, counted)) < 0 or min(map(min, places)) < -1:
        return "a report with counters below zero"
    if max(map(max, counted)) >= MOST or max(map(max, places)) >= MOST:
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
    merged, least = learner.merged[round_.fragment], learner.least_base(round_.fragment)
    if given.fragment != round_.fragment:
        return f"it is fragment {given.fragment}, the round takes {round_.fragment}"
    if not 0 <= given.base <= newest:
        return f"its base is version {given.base}, which this run never committed"
    if given.base < merged:
        return f"its base is version {given.base}, but version {merged} already contains its steps"
    if given.base < least:
        return f"its base is version {given.base}, but the run was rolled back with version {least}"
    if min(given.t, given.steps, given.tokens, given.total, given.position + 1) < 0:
        counters = f"{given.steps} steps, {given.tokens} tokens of {given.total}, step {given.t}"
        return f"its counters are below zero: {counters}, position {given.position}"
    if max(given.t, given.steps, given.tokens, given.total, given.position) >= MOST:
        return "its counters are such as no run reaches"
    if given.tokens > given.total:
        return f"it names {given.tokens} tokens, its process has had {given.total} in all"
    return None
