"""A stream in a run with a kill and a resume: learners read shares of their own, and go on where they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.integrations.conftest import Run
from tests.system.conftest import members

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parent / "scripts" / "stream.py"


def read_lives(run: Run, learner: str) -> list[list[int]]:
    """What each life of a learner trained on, in order."""
    files = sorted(run.folder.glob(f"seen-{learner}-*"), key=lambda path: float(path.name.rpartition("-")[2]))
    return [[int(word) for word in file.read_text().split()] for file in files]


def train_with_a_kill(run: Run, *words: str) -> None:
    given = ("--learners", "2", "--steps", "1200", "--set", "sync_every=8", "--set", "cut_every=4")
    run.train(SCRIPT, *given, "--", *words)
    run.until(lambda events: any(e["kind"] == "cut" and len(e.get("learners", ())) == 2 for e in events))
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))


def stop(run: Run) -> None:
    run.interrupt()
    run.ended()


def test_a_stream_of_hugging_face_goes_on_after_a_kill_and_a_resume(run: Run) -> None:
    train_with_a_kill(run)
    stop(run)
    run.start("train", "--resume", run.out)
    run.until(lambda events: ("learner-1", 3) in members(events))
    stop(run)
    first, other = read_lives(run, "learner-1"), read_lives(run, "learner-0")
    assert len(first) == 3 and len(other) == 2
    assert not {n for life in first for n in life} & {n for life in other for n in life}, "shares are disjoint"
    whole = [*range(1, 12_000, 2)]
    for life in first:
        start = whole.index(life[0])
        assert life == whole[start : start + len(life)]
    assert whole.index(first[1][0]) > 0 and first[1][0] <= first[0][-1] + 2, "behind its snapshot, no sample left out"
    assert first[2][0] == first[1][-1] + 2, "on leaving it saved where it was"


@pytest.mark.faults
def test_a_plain_iterable_is_shared_and_begins_again(run: Run) -> None:
    train_with_a_kill(run, "plain")
    stop(run)
    lives = read_lives(run, "learner-1")
    assert [life[:3] for life in lives] == [[1, 3, 5], [1, 3, 5]] and read_lives(run, "learner-0")[0][:3] == [0, 2, 4]
    assert "does not say where it is" in run.logs() and not run.events("same_batches")
