"""A run on a Ray cluster whose bucket is moto's S3: the cluster is gone, the disk is gone, and it goes on elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.ray_cluster import find_process, find_syncer, opened_cluster, until_no_process
from tests.system.stores import BUCKET, LocalS3, possible, start_s3
from tests.system.test_stores import committed

from atoll.bucket.claims import is_released, newest_term
from atoll.bucket.client import open_bucket

pytest.importorskip("ray", reason="needs Ray (pip install 'atoll[ray]')")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="needs obstore and moto"),
]

URL = f"s3://{BUCKET}/run"
SECRET = "a-secret-of-this-terminal"
LINE = (SCRIPTS / "line.py", "--on", "ray", "--set", "evaluate_every=0", "--set", "overlap=1", "--set", "cut_every=20")


@contextmanager
def terminal_of(s3: LocalS3) -> Iterator[None]:
    """What is started here knows the bucket's credentials; nodes that were made before do not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**s3.environment(), "AWS_SECRET_ACCESS_KEY": SECRET}.items():
            patch.setenv(name, value)
        yield


def read_all(pattern: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{pattern}"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def check_secret(run: Run) -> None:
    """The syncers alone have it, in their environment and in the folder of secrets."""
    assert SECRET.encode() in environment_of(find_syncer(run.out))
    assert SECRET.encode() not in environment_of(find_process(run.out, "learner-0"))
    assert not [line for line in read_all("cmdline") if SECRET.encode() in line]
    holding = [path for path in run.out.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [path.relative_to(run.out).parts[0] for path in holding] == ["secrets"]
    assert holding[0].stat().st_mode & 0o777 == 0o600


def check_secret_in_bucket() -> None:
    """Nobody writes there any more."""
    bucket = open_bucket(URL)
    texts = [key for key in bucket.list_objects() if not key.startswith(("journal/", "cuts/"))]
    assert texts and not [key for key in texts if SECRET.encode() in bucket.get(key)]


def test_with_the_cluster_and_the_disk_gone_it_goes_on_from_the_bucket_on_another_cluster(
    run: Run, tmp_path: Path
) -> None:
    again = Run(run.folder)
    again.out = run.folder / "again"
    with start_s3(tmp_path / "moto.log") as s3:
        with opened_cluster(nodes=2) as first:
            with terminal_of(s3):
                run.train(*LINE, "--learners", "2", "--store", URL, "--set", "durability=store", "--steps", "100000")
                run.until(lambda events: committed(events) > 50 and len(members(events)) == 2)
                check_secret(run)
            first.lose_all()
            run.kill()
        until_no_process(run.out, 30)
        told, name, steps = committed(run.events()), run.events("run")[0]["run"], run.events("round")[-1]["members"]
        shutil.rmtree(run.out)

        with opened_cluster(nodes=2), terminal_of(s3):
            check_secret_in_bucket()
            words = ("--store", URL, "--steps", str(max(one["t"] for one in steps) + 60))
            again.start("train", "--on", "ray", "--resume", again.out, *words).ended()
            until_no_process(again.out, 30)
            (back,) = again.events("reigned")[-1:]
            assert back["run"] == name and back["round"] >= told, "a round that was told is not there"
            assert again.summary["failure"] is None
            verified = again.ask("verify", again.out)
            assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout
            bucket = open_bucket(URL)
            assert is_released(bucket, newest_term(bucket)), "whoever wants to may go on with it"
            assert again.ask("verify", URL).returncode == 0


def test_credentials_that_are_missing_are_one_line_before_anything_starts(run: Run, tmp_path: Path) -> None:
    with start_s3(tmp_path / "moto.log") as s3, opened_cluster(nodes=1):
        s3.refuses["PUT"] = (403, "InvalidAccessKeyId")
        with terminal_of(s3):
            run.train(*LINE, "--learners", "1", "--store", URL).ended(code=2)
        assert "the credentials are not accepted" in run.stderr and run.stderr.count("\n") == 1
        assert not run.events("started")
