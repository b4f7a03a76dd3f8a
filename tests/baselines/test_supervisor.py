"""Whom the two methods let train together, and when the dead are started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.baselines.supervisor import ElasticRun, RestartingRun
from atoll.config import convert
from atoll.store.rundir import RunDir

CONFIG = convert({"protocol": {"learners": 3, "steps": 10}}, "test")
LONG_AGO, LATER = 0.0, float("inf")


@pytest.fixture
def out(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_the_first_elastic_group_waits_for_everybody_later_ones_for_nobody(out: RunDir) -> None:
    run = ElasticRun(CONFIG, out, 1.0)
    run.ready = {0, 2}
    assert run.group_wanted() == ()
    run.ready = {0, 1, 2}
    assert run.group_wanted() == (0, 1, 2)
    run.generation, run.ready = 1, {2, 0}
    assert run.group_wanted() == (0, 2)


def test_an_elastic_rank_is_started_again_on_its_own(out: RunDir) -> None:
    run = ElasticRun(CONFIG, out, 1.0)
    run._due = {0: LATER, 1: LONG_AGO}
    assert run.starts_due() == [1]


def test_restarted_ranks_start_together_once_every_host_is_there(out: RunDir) -> None:
    run = RestartingRun(CONFIG, out, 1.0)
    run._due = {0: LONG_AGO, 1: LONG_AGO}
    assert run.starts_due() == []
    run._due[2] = LATER
    assert run.starts_due() == []
    run._due[2] = LONG_AGO
    assert run.starts_due() == [0, 1, 2]


def test_restarted_ranks_train_all_or_not_at_all(out: RunDir) -> None:
    run = RestartingRun(CONFIG, out, 1.0, checkpoint_every=7)
    run.generation, run.ready = 3, {0, 1}
    assert run.group_wanted() == ()
    run.ready.add(2)
    assert run.group_wanted() == (0, 1, 2)
    assert run.rank_environment(0)["ATOLL_CHECKPOINT_EVERY"] == "7"
