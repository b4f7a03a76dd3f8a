"""A worker of a campaign: seeds in, one a line, outcomes out. `python -m atoll.simulate.worker [LEARNERS]`."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator

import msgspec

from atoll.simulate import campaign
from atoll.simulate.campaign import Outcome
from atoll.simulate.story import Told, tell


class Report(msgspec.Struct, frozen=True):
    """What became of one seed."""

    outcome: Outcome
    told: Told | None = None
    """Where a promise was broken."""


def report(seed: int, learners: int | None, *, traced: bool = True) -> Report:
    plan = campaign.plan(seed, learners)
    outcome = campaign.run(plan, campaign.make(plan, traced=traced))
    return Report(outcome, tell(outcome, plan) if outcome.invariant else None)


def reports(lines: Iterator[str], learners: int | None) -> Iterator[bytes]:
    for line in lines:
        yield msgspec.json.encode(report(int(line), learners, traced=False)) + b"\n"


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    gc.set_threshold(100_000)  # a world lasts for a moment
    for line in reports(iter(sys.stdin.readline, ""), int(arguments[0]) if arguments else None):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
