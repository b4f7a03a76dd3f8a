"""A run in a bucket of this machine: read from it, torn uploads passed over, and a restore that died on its way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.store.written import OUTER, WrittenRun, ended_run, whole

from atoll.bucket.claims import StoredHead, claim_term, release_term, write_head
from atoll.bucket.client import ObjectBucket, open_bucket
from atoll.bucket.layout import CUTS, RELEASED, read_listing, released_key
from atoll.cli.store import _describe_next, finish_upload, open_copy, restore
from atoll.config import Config, Service
from atoll.launch.restoring import _describe_loss, attach_store
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.durable_end import EndLost, check_end, find_end
from atoll.store.head import read_head
from atoll.store.keys import KeyDir
from atoll.store.rebuild import NotKept, load_newest
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore

pytest.importorskip("obstore")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def stored(tmp_path: Path, url: str) -> WrittenRun:
    """A run that ended and is in its bucket, released."""
    run = whole(tmp_path / "run")
    store_run(run, url)
    return run


def store_run(run: WrittenRun, url: str) -> None:
    run.journal.close()
    run.dir.settings.write_bytes(Config(service=Service(store=url)).toml())
    attach_store(run.dir, url)
    assert finish_upload(run.dir, Console(quiet=True)) == ""


def test_a_run_is_verified_from_its_bucket_and_no_copy_is_left(stored: WrittenRun, url: str) -> None:
    with open_copy(url, Console(quiet=True)) as folder:
        assert verify_run(folder).ok
    assert not folder.exists() and read_listing(open_bucket(url).list_objects()).terms == {1, 2}, "nothing is claimed"


class FirstListings:
    """Lists a bucket as a live run's would be listed: the first whole listings differ from what is there a moment
    later."""

    def __init__(self, *changes: Callable[[dict[str, int]], dict[str, int]]) -> None:
        self._changes, self._list = list(changes), ObjectBucket.list_objects

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def list_objects(bucket: ObjectBucket, prefix: str = "") -> dict[str, int]:
            found = self._list(bucket, prefix)
            return found if prefix or not self._changes else self._changes.pop(0)(found)

        monkeypatch.setattr(ObjectBucket, "list_objects", list_objects)


def without_newest_payload(objects: dict[str, int]) -> dict[str, int]:
    """A listing of many pages comes to payloads before it comes to the segments that name them."""
    newest = max(key for key in objects if key.startswith("journal/payload-"))
    return {key: size for key, size in objects.items() if key != newest}


def with_joined_piece(end: int) -> Callable[[dict[str, int]], dict[str, int]]:
    """A piece of a segment that the syncer deletes before it is fetched."""
    return lambda objects: {**objects, f"journal/segment-000001/{0:012d}-{end:012d}": end}


@pytest.mark.parametrize("change", [without_newest_payload, with_joined_piece(10**6)])
def test_what_a_live_run_changed_behind_the_listing_is_no_damage_of_its_copy(
    stored: WrittenRun, url: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, int]], dict[str, int]]
) -> None:
    FirstListings(change).install(monkeypatch)
    with open_copy(url, Console(quiet=True)) as folder:
        assert verify_run(folder).ok and load_newest(RunDir(folder)).round == load_newest(stored.dir).round


def test_a_payload_that_is_lacking_in_every_listing_is_damage(stored: WrittenRun, url: str) -> None:
    bucket = open_bucket(url)
    bucket.delete([max(key for key in bucket.list_objects("journal") if "payload" in key)])
    with open_copy(url, Console(quiet=True)) as folder, pytest.raises((Corrupt, NotKept)):
        load_newest(RunDir(folder))


def test_a_bucket_that_changes_at_every_try_is_not_called_damaged(
    stored: WrittenRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FirstListings(*(with_joined_piece(10**6 + number) for number in range(20))).install(monkeypatch)
    with pytest.raises(RunFailed, match="the run goes on; try again"), open_copy(url, Console(quiet=True)):
        pass


def test_a_bucket_without_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"), open_copy(f"file://{tmp_path}/empty", Console(quiet=True)):
        pass


def test_a_restore_that_died_goes_on_under_its_own_claim(
    stored: WrittenRun, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, again = open_bucket(url), tmp_path / "again"
    bucket.delete([released_key(2)])
    with pytest.raises(ConfigError, match="--take-over"):
        restore(url=url, out=again, take_over=False, read_only=False, accept_loss=False)

    def die(*words: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("atoll.launch.restoring.fetch_run", die)
        with pytest.raises(KeyboardInterrupt):
            restore(url=url, out=again, take_over=True, read_only=False, accept_loss=False)
    assert read_listing(bucket.list_objects()).terms == {1, 2, 3}
    with pytest.raises(ConfigError, match="--take-over"):
        restore(url=url, out=tmp_path / "elsewhere", take_over=False, read_only=False, accept_loss=False)
    restore(url=url, out=again, take_over=False, read_only=False, accept_loss=False)
    assert read_listing(bucket.list_objects()).terms == {1, 2, 3}, "the same claim"
    assert not list(again.parent.glob("again.restoring")) and not (again / "claim.json").exists()


def test_a_claim_that_another_has_followed_is_not_taken_up_again(
    stored: WrittenRun, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, again = open_bucket(url), tmp_path / "again"

    def die(*words: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("atoll.launch.restoring.fetch_run", die)
        with pytest.raises(KeyboardInterrupt):
            restore(url=url, out=again, take_over=False, read_only=False, accept_loss=False)
    assert claim_term(bucket, 4, "another", Path("/"))
    with pytest.raises(ConfigError, match="has not released it"):
        restore(url=url, out=again, take_over=False, read_only=False, accept_loss=False)
    release_term(bucket, 4)
    restore(url=url, out=again, take_over=False, read_only=False, accept_loss=False)
    assert read_listing(bucket.list_objects()).terms == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("released", [True, False])
def test_only_a_new_run_looks_ahead_again_behind_the_last_cycle(tmp_path: Path, url: str, released: bool) -> None:
    old, again = ended_run(tmp_path / "run"), tmp_path / "again"
    store_run(old, url)
    if not released:
        open_bucket(url).delete([released_key(1)])
    restore(url=url, out=again, take_over=not released, read_only=False, accept_loss=False)
    head = read_head(RunDir(again))
    assert head is not None and (head.run == "small") == released
    assert head.outer == {**OUTER, "lr": 0.3, "optimizer": "nesterov-last" if released else "nesterov"}
    assert bool(head.ended) == released and verify_run(again).ok


def test_a_torn_cut_is_passed_over_for_the_one_before_it(
    stored: WrittenRun, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = open_bucket(url)
    newest = read_listing(bucket.list_objects()).complete_cuts()[0]
    bucket.put(newest.key("theta-000.bin"), b"torn")
    restore(url=url, out=tmp_path / "copy", take_over=False, read_only=True, accept_loss=False)
    assert f"cut {newest.cut} of the bucket is passed over" in capsys.readouterr().out
    assert not (tmp_path / "copy" / "cuts" / f"{newest.cut:06d}").exists()


def test_a_torn_piece_of_the_journal_is_refused_where_no_cut_lies_before_it(
    stored: WrittenRun, url: str, tmp_path: Path
) -> None:
    bucket = open_bucket(url)
    newest = max(key for key in bucket.list_objects("journal") if "segment" in key)
    bucket.put(newest, bucket.get(newest)[:-1])
    with pytest.raises(ConfigError, match="holds no cut with them"):
        restore(url=url, out=tmp_path / "less", take_over=False, read_only=False, accept_loss=False)
    assert not (tmp_path / "less").exists()


def test_a_restored_run_knows_its_durable_end(stored: WrittenRun, url: str, tmp_path: Path) -> None:
    restore(url=url, out=tmp_path / "again", take_over=False, read_only=False, accept_loss=False)
    again = RunDir(tmp_path / "again")
    assert check_end(again, LocalDisk()) == find_end(again, LocalDisk()) and verify_run(again.path).ok
    segment = max(again.journal.glob("segment-*.log"))
    os.truncate(segment, segment.stat().st_size - 1)
    assert "the journal ends" in verify_run(again.path).problem
    with pytest.raises(EndLost, match="the journal ends"):
        RunStore(again, acquire(again.journal))


def test_a_bucket_that_holds_less_than_it_held_is_refused_until_that_is_accepted(
    stored: WrittenRun, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was told and is not here yet is no loss of the bucket's."""
    bucket = open_bucket(url)
    rounds, term = load_newest(stored.dir).round, read_listing(bucket.list_objects()).newest_term
    write_head(bucket, term, StoredHead(rounds + 9, rounds, 0.0))
    restore(url=url, out=tmp_path / "whole", take_over=False, read_only=False, accept_loss=False)
    release_term(bucket, term + 1)
    write_head(bucket, term + 1, StoredHead(rounds + 9, rounds + 2, 0.0))
    lost = f"ends at round {rounds - 1}, but round {rounds + 1} was in it"
    with pytest.raises(EndLost, match=lost):
        restore(url=url, out=tmp_path / "less", take_over=False, read_only=False, accept_loss=False)
    assert not (tmp_path / "less").exists()
    restore(url=url, out=tmp_path / "less", take_over=False, read_only=False, accept_loss=True)
    assert "lacks a part of its journal in the bucket" in capsys.readouterr().out
    assert check_end(RunDir(tmp_path / "less"), LocalDisk()) is not None and verify_run(tmp_path / "less").ok


@pytest.mark.parametrize(
    ("told", "known"),
    [
        (8, "all rounds that it had told of by 17:26:50 UTC are here; those"),
        (9, "1 round that it had told of by 17:26:50 UTC is lost; those"),
        (15, "7 rounds that it had told of by 17:26:50 UTC are lost; those"),
    ],
)
def test_rounds_that_may_be_lost_are_not_told_as_none(told: int, known: str) -> None:
    at = 1795109210.0
    words = _describe_loss(8, StoredHead(told, told, at))
    assert words.startswith(known) and "that it told of after that are lost" in words and "number is not known" in words


def test_a_run_that_was_lost_before_its_first_cut_was_stored_begins_anew(
    stored: WrittenRun, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = open_bucket(url)
    bucket.delete([*bucket.list_objects(CUTS), *bucket.list_objects(RELEASED)])
    restore(url=url, out=tmp_path / "again", take_over=True, read_only=False, accept_loss=False)
    assert "holds no snapshot of it yet: the run begins anew" in capsys.readouterr().out
    again = RunDir(tmp_path / "again")
    assert read_head(again) is None
    attach_store(again, url)
    assert acquire(again.journal).term == 4, "behind the term that was claimed for it"


@pytest.mark.parametrize("here", [True, False])
def test_the_command_that_goes_on_names_the_keys_and_the_port_of_the_links(tmp_path: Path, here: bool) -> None:
    """Typed as it was printed, learners did not find the run."""
    keys = KeyDir.create(tmp_path / "keys")
    if here:
        keys.write(keys.certificate, b"")
        keys.write(keys.tokens, b"")
    service = Service(keys=str(keys.path), port=7078)
    (tmp_path / "run.toml").write_bytes(Config(by_hand=True, service=service).toml())
    named = f"--keys {keys.path}" if here else f"--keys DIR, a copy of the run's keys: {keys.path} is not on this"
    assert f"--resume {tmp_path} --port 7078 {named}" in _describe_next(tmp_path)
