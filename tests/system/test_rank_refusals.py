"""Groups of ranks that cannot be a learner: each says why in one line, and the run goes on as before."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.system.conftest import WAIT_S, Run
from tests.system.test_ranks import start_ranks

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(400)]


def start_syncer(run: Run) -> None:
    rules = ("--set", "fragments=3", "--set", "sync_every=4", "--set", "overlap=1")
    run.start("syncer", "--learners", "1", "--out", run.out, "--port", "0", *rules)


def read_ends(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What each said last, once all have ended as after a user's mistake."""
    said = [rank.communicate(timeout=WAIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2] * len(ranks), "\n".join(said)
    assert not any("Traceback" in one for one in said), "\n".join(said)
    return [next(line for line in reversed(one.splitlines()) if line.startswith("atoll: ")) for one in said]


def count_rounds(run: Run) -> int:
    return len(run.events("round"))


def test_ranks_of_two_models_say_which_tensor_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    start_syncer(run)
    monkeypatch.setenv("OTHER_RANK", "1")
    for line in read_ends(start_ranks(run, "learner-0", "fsdp", 2)):
        assert line.startswith("atoll: rank 1 has another model than rank 0: "), line
        assert "(9, 6)" in line or "(9,)" in line, line
    assert not run.events("joined")
    monkeypatch.delenv("OTHER_RANK")
    good = start_ranks(run, "learner-0", "fsdp", 2, "0.02")
    run.until(lambda events: count_rounds(run) > 3)
    end(run, good)


def test_two_groups_of_one_name_are_one_learner_and_one_that_is_told(run: Run, tmp_path: Path) -> None:
    start_syncer(run)
    first = start_ranks(run, "learner-0", "fsdp", 2, "0.02")
    run.until(lambda events: count_rounds(run) > 3)
    before, elsewhere = count_rounds(run), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for line in read_ends(start_ranks(run, "learner-0", "ddp", 2, folder=elsewhere)):
        assert line.startswith("atoll: learner-0 is here already"), line
        assert line.endswith(": choose another --name (ATOLL_LEARNER)"), line
    run.until(lambda events: count_rounds(run) > before + 3)
    end(run, first)


def end(run: Run, ranks: list[subprocess.Popen[str]]) -> None:
    """One learner was there, once, and nothing of it is lost."""
    run.interrupt()
    run.ended()
    said = [rank.communicate(timeout=WAIT_S)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    assert [(one["learner"], one["incarnation"]) for one in run.events("joined")] == [("learner-0", 1)]
    assert run.summary["tokens"]["in_flight"] == 0 and not run.events("unbalanced")
    report = verify_run(run.out)
    assert report.ok, report.problem
