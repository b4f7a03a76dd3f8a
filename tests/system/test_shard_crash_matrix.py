"""A shard of the syncer dies before and after everything it does, and at every step of what it writes down.

As in test_crash_matrix.py, whose points these are for a shard: it kills itself at points laid around its code. Nothing
that anybody was told is missing afterwards, learners went on with their steps, and the run with its rounds. The lead
dies too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run
from tests.system.crashing import facts
from tests.system.test_crash_matrix import end

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CrashShardAt = Callable[..., None]
CRASHING = Path(__file__).parent / "crashing"
WIDE = (SCRIPTS / "diary.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--set", "cut_every=24")
ARGUMENTS = ("--learners", "2", "--syncer-shards", "2", "--", "--width", "700", "--pace", "0.02")
"""Wide enough that both shards hold some of the weight."""

SAMPLE = ("half:segment.write:16!", "before:Apply:14!", "after:Say.Staged:14!")
MATRIX = [
    ("before:ExpectBody:30!", "after:ExpectBody:30!", "before:Say.BodyHere:30!", "after:Say.BodyHere:30!"),
    ("before:Step:20!", "after:Step:20!", "before:Write:20!", "after:Write:20!"),
    ("before:Say.Staged:20!", "after:Say.Staged:20!", "before:Apply:20!", "after:Apply:20!"),
    ("before:payload.write:20!", "half:payload.write:20!", "after:payload.write:20!", "after:payload.sync:20!"),
    ("before:segment.write:20!", "half:segment.write:20!", "after:segment.write:20!", "after:segment.sync:20!"),
    ("before:CaptureCut:1!", "after:CaptureCut:1!", "before:CompletePart:1!", "after:CompletePart:1!"),
    ("before:syncer.json:1!", "after:syncer.json:1!", "before:manifest.json:1!", "after:manifest.json:1!"),
    ("before:FreeBody:30!", "after:FreeBody:30!", "before:Say.TakenUp:1!", "after:Say.TakenUp:1!"),
]
"""Deaths of the first parameters are among them: then the lead starts again too."""
BOTH = [(("before:Commit:20", "after:Persist:20"), ("before:Apply:25!", "after:Say.Staged:25!"))]


@pytest.fixture
def crash_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> CrashShardAt:
    """Starts the run with a shard, and a lead, that die at each of these points, one life after the other."""

    def start(of_shard: tuple[str, ...], of_lead: tuple[str, ...] = ()) -> None:
        paths = [str(CRASHING), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.setenv("ATOLL_CRASH_SHARD_AT", ",".join(of_shard))
        monkeypatch.setenv("ATOLL_CRASH_AT", ",".join(of_lead))
        run.train(*WIDE, *ARGUMENTS)
        run.until(lambda events: len(facts.deaths(run, 2)) == len(of_shard) and len(facts.deaths(run)) == len(of_lead))

    return start


def check(run: Run, points: tuple[str, ...], of_lead: tuple[str, ...] = ()) -> None:
    died = [*facts.deaths(run, 2), *facts.deaths(run)]
    end(run, since=max(one["at"] for one in died))
    assert [one["point"] for one in facts.deaths(run, 2)] == list(points)
    facts.check_rounds(run, most_untold=len(of_lead))
    report = facts.check_files(run)
    assert report.facts["fragment_tokens"]["in_flight"] == 0
    began = run.events("round")[0]["at"]
    for outage in facts.outages(run, [one for one in facts.deaths(run, 2) if one["at"] > began]):
        print(f"{outage.point}: rounds again after {outage.seconds:.2f} s")
        assert outage.seconds < facts.SLOW * facts.AGAIN_S, outage
    assert not [e for e in run.events("restarted") if e["process"].startswith("learner")], "no learner noticed"


def test_a_shard_that_is_killed_loses_nothing(run: Run, crash_at: CrashShardAt) -> None:
    """Three points of the matrix below."""
    crash_at(SAMPLE)
    check(run, SAMPLE)


@pytest.mark.faults
@pytest.mark.parametrize("points", MATRIX, ids=", ".join)
def test_a_shard_loses_nothing_wherever_it_is_killed(run: Run, crash_at: CrashShardAt, points: tuple[str, ...]) -> None:
    crash_at(points)
    check(run, points)


@pytest.mark.faults
@pytest.mark.parametrize("points", BOTH, ids=str)
def test_nor_when_the_lead_is_killed_too(
    run: Run, crash_at: CrashShardAt, points: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    of_lead, of_shard = points
    crash_at(of_shard, of_lead)
    check(run, of_shard, of_lead)
