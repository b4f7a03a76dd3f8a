"""The syncer dies before and after everything it does in a round, and at every step of what it writes down.

It kills itself, in real runs, at points that are laid around its code from outside (crashing/deadly.py); learners and
couriers are killed by the test. Afterwards nothing that anybody was told is missing, those that live went on with their
steps, and the run with its rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from tests.system.conftest import SCRIPTS, Event, Run
from tests.system.crashing import facts, victims
from tests.system.crashing.course import check_outages, end, everybody, train_to_deaths
from tests.system.crashing.facts import Outage

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CrashAt = Callable[..., None]
DIARY = (SCRIPTS / "diary.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
WIDE = ("--", "--width", "600")
"""Its larger fragment is decoded, merged and stepped beside the event loop."""

SAMPLE = ("half:segment.write:15", "before:Commit:15", "after:manifest.json:1")
MATRIX = [
    ("before:Send.Pull:30", "after:Send.Pull:30", "before:Merge:30", "after:Merge:30"),
    ("before:Persist:30", "after:Persist:30", "before:Commit:30", "after:Commit:30"),
    ("before:TakeCut:2", "after:TakeCut:2", "before:CompleteCut:2", "after:CompleteCut:2"),
    ("before:Send.Announce:31", "after:Send.Announce:31", "before:Note.round:30", "after:Note.round:30"),
    ("before:Discard:30", "after:Discard:30", "before:trim:2", "after:trim:2"),
    ("before:payload.write:30", "half:payload.write:30", "after:payload.write:30", "after:payload.sync:30"),
    ("before:segment.write:30", "half:segment.write:30", "after:segment.write:30", "after:segment.sync:30"),
    ("before:syncer.json:2", "after:syncer.json:2", "before:manifest.json:2", "after:manifest.json:2"),
]
"""Four deaths in a row are as many as the supervisor takes for an accident, with one to spare."""
WIDE_MATRIX = [
    ("after:Merge:31", "half:payload.write:31", "before:Commit:31", "after:TakeCut:2"),
    ("before:Merge:30", "after:payload.sync:30", "half:segment.write:30", "before:manifest.json:2"),
]

CODECS = [("fp32", "bf16"), ("int8", "int8"), ("int4", "int4"), ("topk", "topk")]
"""Of contributions and of versions."""


@pytest.fixture
def crash_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> CrashAt:
    """Starts the run with a syncer that dies at each of these points, one life after the other."""

    def start(points: tuple[str, ...], *options: str) -> None:
        train_to_deaths(run, monkeypatch, *DIARY, *options, of_syncer=points)

    return start


def check_nothing_lost(run: Run, points: tuple[str, ...], *, silent: int = 0) -> dict[str, int]:
    """Of a run whose syncer died at these points, and nobody else; `silent`: lives that left no record. Its fates."""
    assert [death["point"] for death in facts.deaths(run)] == list(points)
    assert [e["process"] for e in run.events("restarted")] == ["syncer"] * len(points), "and no learner"
    assert not [e["text"] for e in run.events("refused") if "running median" in e["text"]], "nobody did anything absurd"
    facts.check_rounds(run, most_untold=len(points))
    report = facts.check_files(run)
    assert report.facts["terms"] == len(points) + 1 - silent
    fates: dict[str, int] = report.facts["fragment_tokens"]
    assert fates["in_flight"] == 0
    return fates


def check_course(run: Run) -> None:
    outages = facts.outages(run, facts.deaths(run))
    check_outages(outages)
    facts.check_kept_stepping(run, outages)
    assert facts.check_adopted(run) > 50


def survive(run: Run, crash_at: CrashAt, points: tuple[str, ...], *options: str) -> None:
    crash_at(points, *options)
    end(run, since=facts.deaths(run)[-1]["at"])
    check_course(run)
    assert check_nothing_lost(run, points)["lost"] == 0


def test_a_syncer_that_is_killed_loses_nothing(run: Run, crash_at: CrashAt) -> None:
    """Three points of the matrix below."""
    survive(run, crash_at, SAMPLE, "--", "--pace", "0.02")
    torn = [e["text"] for e in run.events("warning") if "of an append that was never acknowledged" in e["text"]]
    assert len(torn) == 1, "half an append lay at the end of the first segment, and that was said"


@pytest.mark.faults
@pytest.mark.parametrize("points", MATRIX, ids=", ".join)
def test_a_syncer_loses_nothing_wherever_it_is_killed(run: Run, crash_at: CrashAt, points: tuple[str, ...]) -> None:
    survive(run, crash_at, points)


@pytest.mark.faults
@pytest.mark.parametrize("points", WIDE_MATRIX, ids=", ".join)
def test_nor_does_one_that_merges_beside_its_event_loop(run: Run, crash_at: CrashAt, points: tuple[str, ...]) -> None:
    survive(run, crash_at, points, *WIDE)


@pytest.mark.faults
@pytest.mark.parametrize("codecs", CODECS, ids="/".join)
def test_nor_does_one_whose_run_has_another_codec(run: Run, crash_at: CrashAt, codecs: tuple[str, str]) -> None:
    up, down = codecs
    survive(run, crash_at, WIDE_MATRIX[1], "--set", f"codec={up}", "--set", f"version_codec={down}", *WIDE)


@pytest.mark.faults
def test_a_syncer_that_dies_before_the_run_has_parameters_asks_for_them_again(run: Run, crash_at: CrashAt) -> None:
    """The run's first record, its first cut, the cut's manifest and the record of it: none may be missing for long."""
    points = ("before:segment.write:2!", "before:syncer.json:1!", "after:syncer.json:1!", "after:manifest.json:1!")
    crash_at(points)
    run.until(lambda events: sum(event["kind"] == "round" for event in events) >= 24)  # three cycles: some are adopted
    end(run, since=facts.deaths(run)[-1]["at"])
    assert check_nothing_lost(run, points, silent=1)["lost"] == 0
    assert facts.check_adopted(run) > 0


@pytest.mark.faults
def test_a_syncer_that_dies_at_the_end_of_its_run_brings_it_to_its_end(run: Run, crash_at: CrashAt) -> None:
    points = ("after:Send.Ending:1!", "after:Send.Finish:1!", "before:model:1!", "after:model:1!")
    crash_at(points, "--steps", "60")
    run.ended()
    print(f"fragment-tokens: {check_nothing_lost(run, points)}")
    assert run.summary["reason"] == "60 steps are done"


@pytest.mark.faults
def test_a_killed_learner_or_courier_costs_the_others_nothing(run: Run) -> None:
    """A courier, a learner, and both at once: they come back, and meanwhile rounds and steps of the others go on."""
    run.train(*DIARY)
    run.until(lambda events: everybody(events, since=0.0))
    aways = []
    for names in (("courier-1",), ("learner-1",), ("learner-1", "courier-1")):
        killed = time.time()
        assert victims.kill(run, *names)
        run.until(lambda events, since=killed: is_back("learner-1", events, since))
        away = Outage(" and ".join(names), killed, time.time())
        pause_s = longest_pause(run, away)
        print(f"{away.point}: back after {away.seconds:.2f} s, longest pause of rounds {pause_s:.3f} s")
        assert pause_s < facts.SLOW * facts.STILL_S
        aways.append(away)
    end(run, since=time.time())
    facts.check_kept_stepping(run, aways, {"learner-0"})
    assert [e["process"] for e in run.events("restarted")] == ["learner-1", "learner-1"]
    facts.check_rounds(run, most_untold=0)
    assert facts.check_adopted(run) > 50
    report = facts.check_files(run)
    assert (report.facts["terms"], report.facts["incarnations"]) == (1, 4), "a new courier is no new incarnation"


def is_back(learner: str, events: list[Event], since: float) -> bool:
    """Whether it joined and was in a round after that."""
    joined = [e["at"] for e in events if e["kind"] == "joined" and e["learner"] == learner and e["at"] > since]
    return bool(joined) and everybody(events, since=joined[0])


def longest_pause(run: Run, outage: Outage) -> float:
    rounds = [e["at"] for e in run.events("round") if outage.died < e["at"] < outage.again]
    return max(b - a for a, b in pairwise([outage.died, *rounds, outage.again]))
