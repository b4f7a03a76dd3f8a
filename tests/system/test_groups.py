"""A loader whose sampler makes groups, in a run of two learners."""

from __future__ import annotations

import pytest
from tests.system.conftest import SCRIPTS, Run

pytestmark = pytest.mark.system


def test_groups_of_a_sampler_stay_whole_and_each_learner_has_an_order_of_its_own(run: Run) -> None:
    short = ("--steps", "40", "--set", "evaluate_every=0", "--set", "overlap=1", "--set", "sync_every=8")
    run.train(SCRIPTS / "groups.py", "--learners", "2", *short).ended()
    logs = [(run.out / "logs" / f"learner-{index}.log").read_text() for index in (0, 1)]
    begins = [next(line for line in log.splitlines() if line.startswith("begins with")) for log in logs]
    assert begins[0] != begins[1]
    stays = "RepeatSampler chooses the samples and stays: they are counted, not leased; its order is seeded by this"
    assert all(log.count(stays) == 1 for log in logs), logs
