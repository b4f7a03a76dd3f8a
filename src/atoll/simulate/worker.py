"""A worker of a campaign: seeds in, one a line, outcomes out. `python -m atoll.simulate.worker [LEARNERS]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec

from atoll.simulate import campaign, worker_pool
from atoll.simulate.campaign import Outcome
from atoll.simulate.story import FailureReport, explain_failure


class Report(msgspec.Struct, frozen=True):
    """What became of one seed."""

    outcome: Outcome
    told: FailureReport | None = None
    """Where a promise was broken."""


def report(seed: int, learners: int | None, *, traced: bool = True) -> Report:
    plan = campaign.plan(seed, learners)
    outcome = campaign.run(plan, campaign.make(plan, traced=traced))
    return Report(outcome, explain_failure(outcome, plan) if outcome.invariant else None)


def all_of(seeds: Sequence[int], learners: int | None, workers: int) -> Iterator[Report]:
    """On so many cores."""
    arguments = () if learners is None else (str(learners),)
    for line in worker_pool.run("atoll.simulate.worker", [str(seed) for seed in seeds], workers, *arguments):
        yield msgspec.json.decode(line, type=Report)


def reports(lines: Iterator[str], learners: int | None) -> Iterator[bytes]:
    for line in lines:
        yield msgspec.json.encode(report(int(line), learners, traced=False)) + b"\n"


def main(arguments: list[str]) -> None:
    worker_pool.serve(lambda lines: reports(lines, int(arguments[0]) if arguments else None))


if __name__ == "__main__":
    main(sys.argv[1:])
