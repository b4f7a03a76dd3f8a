"""A run whose version 0 travels in 2 bytes a value, through a kill of everything, a resume and a replay.

In every run of the tests test_chaos.py replays such a run, whose learner and syncer were killed."""

from __future__ import annotations

import pytest
from tests.system.conftest import SCRIPTS, Event, Run

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

OPTIONS = ("--learners", "2", "--set", "evaluate_every=0", "--set", "wait_for_learners_s=240", "--steps", "100000")


def rounds(events: list[Event]) -> int:
    return sum(event["kind"] == "round" for event in events)


@pytest.mark.faults
@pytest.mark.parametrize("shards", ["1", "2"])
def test_it_is_verified_resumed_and_repeated_bit_for_bit(run: Run, shards: str) -> None:
    run.train(SCRIPTS / "line.py", *OPTIONS, "--set", "initial_codec=bf16", "--syncer-shards", shards)
    run.until(lambda events: rounds(events) >= 12)
    [initial] = run.events("initial")
    assert 1e-4 < initial["relative_error"] < 2.0**-8
    error = f"{initial['relative_error']:.2e}"
    assert f"rounded to bf16: relative error {error} (norm of the difference / norm)" in initial["text"]
    told = [path.read_text() for path in run.out.glob("logs/learner-*.log")]
    assert sum(f"version 0 is this model rounded to bf16: relative error {error}" in text for text in told) == 1
    run.kill_everything()
    report = verify_run(run.out)
    assert report.ok, report.problem
    before = rounds(run.events())
    run.start("train", "--resume", run.out)
    run.until(lambda events: rounds(events) >= before + 12)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    run.check_replay()
