"""One script, unchanged: alone, by `atoll train`, by hand as the files for Kubernetes and SkyPilot do, under Slurm;
on Ray in test_ray.py, which has a cluster. Every run has a summary.json with the same fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.conftest import Run
from tests.system.conftest import WAIT_S
from tests.system.slurm import LocalSlurm
from tests.system.test_slurm import Cluster

pytestmark = [pytest.mark.integrations, pytest.mark.system, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent / "scripts" / "anywhere.py"
ASKED = ("--learners", "2", "--steps", "30", "--set", "fragments=4", "--set", "sync_every=8")
OF_EVALUATORS = {"metrics"}
"""Fields whose own fields depend on whether somebody scored the model: by hand nobody does unless asked."""


def fields(summary: dict[str, Any]) -> Iterator[str]:
    """With those inside; of learners, those of the first."""
    for name, value in summary.items():
        yield name
        if isinstance(value, dict) and name not in OF_EVALUATORS:
            inner = next(iter(value.values()), {}) if name == "per_learner" else value
            yield from (f"{name}/{one}" for one in (inner if isinstance(inner, dict) else {}))


def by_train(run: Run) -> dict[str, Any]:
    run.train(SCRIPT, *ASKED).ended()
    return run.summary


def by_hand(run: Run) -> dict[str, Any]:
    """The commands of examples/deploy/skypilot, less what makes machines and keys."""
    run.start("syncer", "--out", run.out, *ASKED, "--port", "0")
    url = run.address()
    learners = []
    for number in range(2):
        env = run.environment({"ATOLL_JOIN": url, "ATOLL_LEARNER": f"learner-{number}"})
        with (run.folder / f"{number}.log").open("w") as log:
            learners.append(subprocess.Popen([sys.executable, str(SCRIPT)], cwd=run.folder, env=env, stderr=log))
    assert [learner.wait(WAIT_S) for learner in learners] == [0, 0]
    run.ended()
    return run.summary


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    run = Run(tmp_path_factory.mktemp("train"))
    return set(fields(by_train(run)))


def test_alone_it_trains_and_ends(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    words = [sys.executable, str(SCRIPT)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "alone" in done.stderr and not list(tmp_path.iterdir())


def test_by_hand_it_gives_the_same_fields(usual: set[str], run: Run) -> None:
    assert set(fields(by_hand(run))) == usual
    assert {"goodput", "tokens/merged", "per_learner/merged_share", "settings/sync_every"} <= usual


@pytest.mark.skipif(not LocalSlurm.possible(), reason="needs root, slurmctld, slurmd and munged")
def test_under_slurm_it_gives_the_same_fields(usual: set[str], tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    slurm = LocalSlurm(folder)
    try:
        cluster = Cluster(slurm, tmp_path / "work")
        summary = cluster.check_end(cluster.start(2, 30, SCRIPT))
    finally:
        slurm.close()
    assert set(fields(summary)) == usual
    assert json.dumps(sorted(summary["per_learner"])) == '["learner-0", "learner-1"]'
