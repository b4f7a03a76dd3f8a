"""Who may write to a bucket; and what a bucket that fails is said to be."""

from __future__ import annotations

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.bucket.claims import (
    PlaceClaimed,
    begin_store,
    claim_term,
    claim_through,
    newest_term,
    read_claim,
    read_place,
    release_term,
)
from atoll.bucket.client import Bucket, MissingKey, StoreRefused, StoreUnavailable, TakenKey, open_bucket
from atoll.bucket.restore import claim_run
from atoll.config import Config
from atoll.extras import install_command
from atoll.launch.restoring import attach_store
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import Deposed, acquire, read_claim_token

pytest.importorskip("obstore")


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket")


def begin(bucket: Bucket, folder: Path) -> RunDir:
    """A run in its first term."""
    out = RunDir.create(folder)
    begin_store(bucket, folder)
    acquire(out.journal).release()
    claim_through(bucket, 1, out)
    bucket.put("files/000001/run.toml", Config().toml())
    return out


def test_of_sixteen_claimants_one_wins(bucket: Bucket) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: claim_term(bucket, 1, f"disk-{n}", Path("/")), range(16)))
    assert won.count(True) == 1 and read_claim(bucket, 1).token == f"disk-{won.index(True)}"


def test_a_bucket_that_holds_a_run_is_refused_to_another(bucket: Bucket, tmp_path: Path) -> None:
    begin(bucket, tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="holds another run"):
        begin_store(bucket, tmp_path / "b")


def test_a_start_that_came_no_further_than_its_probe_is_no_run(bucket: Bucket, tmp_path: Path) -> None:
    first = begin_store(bucket, tmp_path)
    second = begin_store(bucket, tmp_path)
    assert first.id == second.id and read_place(tmp_path) == second


def test_terms_that_passed_while_the_store_was_down_are_claimed_later(bucket: Bucket, tmp_path: Path) -> None:
    out = begin(bucket, tmp_path / "a")
    for _ in range(3):
        acquire(out.journal).release()
    claim_through(bucket, 4, out)
    tokens = [read_claim_token(out.journal, term) for term in range(1, 5)]
    assert [read_claim(bucket, term).token for term in range(1, 5)] == tokens and len(set(tokens)) == 4


def test_who_has_not_the_newest_claim_is_deposed_however_high_its_own_term(bucket: Bucket, tmp_path: Path) -> None:
    out = begin(bucket, tmp_path / "a")
    assert claim_term(bucket, 2, "another", tmp_path)
    with pytest.raises(Deposed):
        claim_through(bucket, 7, out)
    with pytest.raises(ConfigError, match="went on elsewhere"):
        attach_store(out, bucket.url)


def test_of_two_disks_alike_to_the_inode_only_one_claims_a_term_and_the_other_is_refused_for_good(
    bucket: Bucket, tmp_path: Path
) -> None:
    """As after a snapshot of the whole disk, where nothing in the folder tells the two apart."""
    first = begin(bucket, tmp_path / "a")
    clone = RunDir(Path(shutil.copytree(first.path, tmp_path / "b")))
    for out in (first, clone):
        acquire(out.journal).release()
    claim_through(bucket, 2, clone)
    claim_through(bucket, 2, clone)  # the same again, as where an answer was lost
    for term in (1, 2, 3):
        with pytest.raises(Deposed):
            claim_through(bucket, term, first)
    acquire(first.journal).release()
    with pytest.raises(ConfigError, match=f"went on elsewhere .{clone.path}"):
        attach_store(first, bucket.url)


def test_two_threads_of_a_shard_may_see_the_claim_of_its_run_at_the_same_moment(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = RunDir.create(tmp_path / "a"), bucket.exists
    begin_store(bucket, out.path)
    shard = PlaceClaimed(bucket, out)
    shard.begin()
    acquire(out.journal).release()
    claim_through(bucket, 1, out)

    def see_while_the_other_does(key: str) -> bool:
        monkeypatch.setattr(bucket, "exists", seen)
        assert not shard.is_over()
        return seen(key)

    monkeypatch.setattr(bucket, "exists", see_while_the_other_does)
    assert not shard.is_over()
    assert claim_term(bucket, 2, "another", tmp_path) and shard.is_over()


@pytest.mark.parametrize(
    ("durability", "released", "take_over", "allowed", "behind"),
    [
        ("round", False, False, False, False),
        ("round", False, True, True, True),
        ("round", True, False, True, False),
        ("store", False, False, True, False),
    ],
)
def test_who_may_claim_a_run(
    bucket: Bucket, tmp_path: Path, durability: str, released: bool, take_over: bool, allowed: bool, behind: bool
) -> None:
    begin(bucket, tmp_path / "a")
    bucket.put("files/000001/run.toml", f'[service]\nstore = "s3://x/y"\ndurability = "{durability}"\n'.encode())
    if released:
        release_term(bucket, 1)
    if not allowed:
        with pytest.raises(ConfigError, match="has not released it"):
            claim_run(bucket, tmp_path / "b", take_over=take_over)
        assert newest_term(bucket) == 1
        return
    found = claim_run(bucket, tmp_path / "b", take_over=take_over)
    assert (found.term, found.behind) == (2, behind) and newest_term(bucket) == 2


def test_an_empty_bucket_holds_no_run(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        claim_run(bucket, tmp_path, take_over=True)


def test_a_bucket_creates_reads_lists_and_deletes(bucket: Bucket, tmp_path: Path) -> None:
    bucket.create("a/1", b"one")
    with pytest.raises(TakenKey):
        bucket.create("a/1", b"two")
    file = tmp_path / "file"
    file.write_bytes(bytes(9 * 2**20))
    bucket.put_file("a/large", file)
    bucket.get_file("a/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    assert bucket.get("a/1") == b"one" and bucket.exists("a/1") and not bucket.exists("a/2")
    assert bucket.list_objects() == {"a/1": 3, "a/large": 9 * 2**20}
    bucket.delete(["a/1", "a/none", "a/large"])
    assert bucket.list_objects() == {}
    with pytest.raises(MissingKey):
        bucket.get("a/1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/run", "write it as s3://bucket/run"),
        ("s3:///run", "write it as s3://bucket/run"),
        ("memory:///run", "write it as s3://bucket/run"),
        ("ftp://host/run", "write it as s3://bucket/run"),
        ("s3://key:secret@bucket/run", "takes no secrets"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_bucket(url)


def test_without_obstore_the_next_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("store"))):
        open_bucket("s3://bucket/run")


def test_a_store_that_nobody_listens_at_may_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable) as raised:
        open_bucket("s3://bucket/run").create("probe", b"")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("… 403 Forbidden: <Error><Code>ExpiredToken</Code>", "have expired"),
        ("… 403 Forbidden: <Error><Code>InvalidAccessKeyId</Code>", "are not accepted"),
        ("… 403 Forbidden: <Error><Code>AccessDenied</Code>", "may not create there"),
        ("Error performing PUT http://169.254.169.254/latest/api/token", "no credentials were found"),
    ],
)
def test_what_another_try_would_not_mend_is_said_with_the_next_step(bucket: Bucket, text: str, said: str) -> None:
    def fail() -> None:
        raise OSError(text)

    with pytest.raises(StoreRefused, match=said):
        bucket._ask("create", "probe", fail)  # type: ignore[attr-defined]
