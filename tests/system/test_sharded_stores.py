"""A syncer of several shards whose run is in a bucket: each shard uploads its own part, and what comes back is one
state of all of them (docs/adr/0033)."""

from __future__ import annotations

import pytest
from tests.system.conftest import Run
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3
from tests.system.test_stores import FEW, committed, go_on, lose_disk

from atoll.bucket.client import open_bucket
from atoll.bucket.layout import SHARDS, read_listing

pytestmark = [
    pytest.mark.system,
    pytest.mark.faults,
    pytest.mark.skipif(not possible(), reason="needs obstore and moto: make integrations"),
]

URL = f"s3://{BUCKET}/run"
SHAPE = ("--learners", "2", "--set", "evaluate_every=0", *FEW, "--store", URL, "--syncer-shards", "2")


def check_verified(run: Run) -> None:
    verified = run.command("verify", run.out)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout + verified.stderr


def test_with_durability_store_a_lost_disk_costs_nothing(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, "--set", "durability=store", replayed=False)
    run.until(lambda events: committed(events) > 25)
    told = lose_disk(run)
    again = go_on(run, run.folder / "again", "--store", URL, "--steps", "80")
    (back,) = again.events("reigned")[-1:]
    assert back["round"] >= told, "a round that was told is not there"
    assert back["run"] == again.events("run")[0]["run"], "it is the same run"
    check_verified(again)


def test_with_durability_round_what_comes_back_is_one_state_of_all_shards(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 45)
    old = run.events("run")[0]["run"]
    told = lose_disk(run)
    again = run.folder / "again"
    refused = run.command("train", "--resume", again, "--store", URL)
    assert refused.returncode == 2 and "--take-over" in refused.stderr
    restored = run.command("restore", URL, again, "--take-over")
    assert restored.returncode == 0, restored.stderr
    assert f"run {old} was not released" in restored.stdout
    after = go_on(run, again, "--steps", "80")
    (back,) = after.events("reigned")[-1:]
    assert back["run"] != old and told - 30 < back["round"] <= told, "a second's rounds may be lost, not a cut's"
    check_verified(after)
    third = go_on(run, run.folder / "third", "--store", URL, "--steps", "100")
    assert third.events("reigned")[-1]["run"] == back["run"], "it was released, so it goes on"
    check_verified(third)


def test_a_shard_that_is_ahead_of_the_others_in_the_bucket_does_not_count(run: Run, s3: LocalS3) -> None:
    """The bucket loses the end of shard 2's chain: the lead's journal names rounds that nobody has any more."""
    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 25)
    lose_disk(run)
    bucket = open_bucket(f"{URL}/{SHARDS}/2")
    names = sorted(key for key in bucket.list_objects("journal") if "segment" in key)
    bucket.delete(names[-2:])
    restored = run.command("restore", URL, run.folder / "again", "--take-over")
    assert restored.returncode == 0, restored.stderr
    after = go_on(run, run.folder / "again", "--steps", "80")
    check_verified(after)


def test_a_released_run_has_every_shard_in_the_bucket_and_old_cuts_are_deleted(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100", *SHAPE, "--set", "keep_cuts=2", replayed=False).ended()
    for url in (URL, f"{URL}/{SHARDS}/2"):
        listing = read_listing(open_bucket(url).list_objects())
        cuts = {key.cut for key in listing.complete_cuts()}
        assert 1 <= len(cuts) <= 3 and 0 not in cuts, f"{url}: {cuts}"
    copy = run.folder / "copy"
    restored = run.command("restore", URL, copy, "--read-only")
    assert restored.returncode == 0, restored.stderr
    for name in ("journal/segment-000001.log", "shards/2/journal/segment-000001.log", "model.safetensors"):
        assert (copy / name).read_bytes() == (run.out / name).read_bytes(), name
    run.out = copy
    check_verified(run)
