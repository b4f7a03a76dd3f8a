"""The course of a run whose processes kill themselves: from the points at which they do to its good end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.system.conftest import Event, Run, members
from tests.system.crashing import facts
from tests.system.crashing.facts import Outage

CRASHING = Path(__file__).parent
Points = tuple[str, ...]


def train_to_deaths(
    run: Run, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, of_syncer: Points = (), of_shard: Points = ()
) -> None:
    """Start it, and wait until its syncer (the lead), and a shard, have died at each of these points, one life after
    the other."""
    paths = [str(CRASHING), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("ATOLL_CRASH_AT", ",".join(of_syncer))
    monkeypatch.setenv("ATOLL_CRASH_SHARD_AT", ",".join(of_shard))
    run.train(*arguments)
    run.until(lambda _: (len(facts.deaths(run)), len(facts.deaths(run, 2))) == (len(of_syncer), len(of_shard)))


def everybody(events: list[Event], since: float) -> bool:
    """Whether both learners were in rounds since then."""
    return {name for name, _ in members([e for e in events if e["at"] > since])} == {"learner-0", "learner-1"}


def end(run: Run, since: float) -> None:
    """Everybody takes part again, then the run ends in good order."""
    run.until(lambda events: everybody(events, since))
    run.interrupt()
    run.ended()


def check_outages(outages: list[Outage]) -> None:
    for outage in outages:
        print(f"{outage.point}: rounds again after {outage.seconds:.2f} s")
        assert outage.seconds < facts.SLOW * facts.AGAIN_S, outage
