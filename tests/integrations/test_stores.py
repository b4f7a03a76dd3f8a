"""A short run with moto's S3 as its bucket; what is killed and what fails is in tests/system (make faults)."""

from __future__ import annotations

import shutil

import pytest
from tests.system.conftest import Run
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3
from tests.system.test_stores import test_of_sixteen_claimants_one_wins as test_of_sixteen_claimants_one_wins

pytestmark = [pytest.mark.integrations, pytest.mark.skipif(not possible(), reason="needs obstore and moto")]


def test_a_run_goes_on_from_its_bucket_on_an_empty_disk(run: Run, s3: LocalS3) -> None:
    url = f"s3://{BUCKET}/run"
    run.train("--learners", "1", "--steps", "30", "--set", "evaluate_every=0", "--store", url, replayed=False).ended()
    first = run.events("run")[0]["run"]
    shutil.rmtree(run.out)
    again = Run(run.folder)
    again.out = run.folder / "again"
    again.start("train", "--resume", again.out, "--store", url, "--steps", "50").ended()
    assert again.events("reigned")[-1]["run"] == first and again.summary["failure"] is None
    verified = again.ask("verify", again.out)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout
