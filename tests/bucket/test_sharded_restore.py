"""A run of two shards, each with its part of a bucket of this machine, brought back: as it was, or as far as all parts
of it came (docs/adr/0033)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tests.syncer.test_shards import begin, make_ended_run, outers_at, play, sharded

from atoll.bucket.client import open_bucket
from atoll.bucket.layout import released_key, shard_url
from atoll.cli.store import finish_upload, restore
from atoll.config import Config, Service
from atoll.launch.restoring import attach_store
from atoll.store.head import read_head
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run

pytest.importorskip("obstore")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
async def stored(tmp_path: Path, url: str) -> RunDir:
    """A run that ended and is in its bucket, released."""
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 7)
        await stage.until("cut")
        await stage.end()
    store_run(stage.out, url)
    return stage.out


def store_run(run: RunDir, url: str) -> None:
    run.settings.write_bytes(Config(service=Service(store=url, shards=2)).toml())
    attach_store(run, url)
    assert finish_upload(run, Console(quiet=True)) == ""


def bring_back(url: str, out: Path, *, take_over: bool = False) -> RunDir:
    restore(url=url, out=out, take_over=take_over, read_only=False, accept_loss=False)
    report = verify_run(out)
    assert report.ok, report.problem
    return RunDir(out)


def rounds_of(run: RunDir) -> int:
    head = read_head(run)
    assert head is not None
    return head.committed


async def test_a_released_run_comes_back_as_it_was_as_often_as_it_is_moved(
    stored: RunDir, url: str, tmp_path: Path
) -> None:
    rounds, name = rounds_of(stored), read_head(stored)
    shutil.rmtree(stored.path)
    for place in ("second", "third"):
        again = bring_back(url, tmp_path / place)
        assert rounds_of(again) == rounds and name is not None and (found := read_head(again)) is not None
        assert found.run == name.run
        assert finish_upload(again, Console(quiet=True)) == ""


async def test_of_a_run_that_was_not_released_a_new_one_begins_where_all_shards_are(
    stored: RunDir, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shard 2's last piece never came: the lead's journal names a round that nobody has."""
    rounds = rounds_of(stored)
    open_bucket(url).delete([released_key(1)])
    other = open_bucket(shard_url(url, 2))
    last = max(key for key in other.list_objects("journal") if "payload" in key)
    other.put(last, other.get(last)[:-1])
    shutil.rmtree(stored.path)
    again = bring_back(url, tmp_path / "again", take_over=True)
    assert 4 <= rounds_of(again) < rounds, "from its cut on, and not as far as the lead's journal"
    assert "a new run" in capsys.readouterr().out
    assert finish_upload(again, Console(quiet=True)) == ""
    third = bring_back(url, tmp_path / "third")
    assert rounds_of(third) == rounds_of(again)


async def test_a_new_run_looks_ahead_again_in_all_shards_behind_the_last_cycle(tmp_path: Path, url: str) -> None:
    ended = await make_ended_run(tmp_path, 2)
    store_run(ended, url)
    open_bucket(url).delete([released_key(1)])
    again = bring_back(url, tmp_path / "again", take_over=True)
    assert outers_at(ended, 7) == ["nesterov-last"] * 2
    assert outers_at(again, 7) == ["nesterov"] * 2
