"""A shard of the syncer dies before and after everything it does, and at every step of what it writes down.

As in test_crash_matrix.py, whose points these are for a shard: it kills itself at points laid around its code. Nothing
that anybody was told is missing afterwards, learners went on with their steps, and the run with its rounds. The lead
dies too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.system.conftest import SCRIPTS, Run
from tests.system.crashing import facts
from tests.system.crashing.course import check_outages, end, train_to_deaths

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CrashShardAt = Callable[..., None]
WIDE = (SCRIPTS / "diary.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--set", "cut_every=24")
ARGUMENTS = ("--learners", "2", "--syncer-shards", "2", "--", "--width", "700", "--pace", "0.02")
"""Wide enough that both shards hold some of the weight."""

SAMPLE = ("half:segment.write:16!", "before:Apply:14!", "after:TellLead.Staged:14!")
MATRIX = [
    ("before:ExpectBody:30!", "after:ExpectBody:30!", "before:TellLead.BodyHere:30!", "after:TellLead.BodyHere:30!"),
    ("before:Step:20!", "after:Step:20!", "before:Write:20!", "after:Write:20!"),
    ("before:TellLead.Staged:20!", "after:TellLead.Staged:20!", "before:Apply:20!", "after:Apply:20!"),
    ("before:payload.write:20!", "half:payload.write:20!", "after:payload.write:20!", "after:payload.sync:20!"),
    ("before:segment.write:20!", "half:segment.write:20!", "after:segment.write:20!", "after:segment.sync:20!"),
    ("before:CaptureCut:1!", "after:CaptureCut:1!", "before:CompletePart:1!", "after:CompletePart:1!"),
    ("before:syncer.json:1!", "after:syncer.json:1!", "before:manifest.json:1!", "after:manifest.json:1!"),
    ("before:FreeBody:30!", "after:FreeBody:30!", "before:TellLead.TakenUp:1!", "after:TellLead.TakenUp:1!"),
]
"""Deaths of the first parameters are among them: then the lead starts again too."""
BOTH = [(("before:Commit:20", "after:Persist:20"), ("before:Apply:25!", "after:TellLead.Staged:25!"))]


@pytest.fixture
def crash_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> CrashShardAt:
    """Starts the run with a shard, and a lead, that die at each of these points, one life after the other."""

    def start(of_shard: tuple[str, ...], of_lead: tuple[str, ...] = ()) -> None:
        train_to_deaths(run, monkeypatch, *WIDE, *ARGUMENTS, of_syncer=of_lead, of_shard=of_shard)

    return start


def check(run: Run, points: tuple[str, ...], of_lead: tuple[str, ...] = ()) -> None:
    died = facts.deaths(run, 2)
    last = max(one["at"] for one in (*died, *facts.deaths(run)))
    run.until(lambda _: any(one["at"] > last for one in facts.returns(run, 2)))
    end(run, since=last)
    assert [one["point"] for one in died] == list(points)
    facts.check_rounds(run, most_untold=len(of_lead))
    report = facts.check_files(run)
    assert report.facts["fragment_tokens"]["in_flight"] == 0
    began = run.events("round")[0]["at"]
    check_outages(facts.outages(run, [one for one in died if one["at"] > began]))
    again = [one for one in facts.returns(run, 2) if one["at"] > died[0]["at"]]  # its first life waits for a learner
    for one in again:
        print(f"of its own time: back after {one['back_s']:.2f} s, a round staged in {one['staged_s']:.2f} s")
        assert one["back_s"] + one["staged_s"] < facts.SLOW * facts.AGAIN_S
    assert not [e for e in run.events("restarted") if e["process"].startswith("learner")], "no learner noticed"


def test_a_shard_that_is_killed_loses_nothing(run: Run, crash_at: CrashShardAt) -> None:
    """Three points of the matrix below."""
    crash_at(SAMPLE)
    check(run, SAMPLE)
    told = [event["text"] for event in run.events("alarm")]
    assert told[0].startswith("shard 2 was lost") and told[-1].startswith("shard 2 is back")


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
