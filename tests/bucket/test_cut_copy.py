"""Cuts of several shards on their way into the bucket: whole at the lead once they are whole everywhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from atoll.bucket.client import Bucket, open_bucket
from atoll.bucket.cut_copy import LeadCutCopy, ShardCutCopy
from atoll.bucket.layout import read_listing, shard_url
from atoll.store.cuts import Manifest, write_manifest, write_syncer_part
from atoll.store.rundir import RunDir
from atoll.store.segments import Position
from atoll.store.shards import ShardCut

pytest.importorskip("obstore")


def write_part(out: RunDir, cut: int, shards: tuple[str, ...] = ()) -> str:
    """A shard's part of a cut; for these tests the lead's is one too."""
    state = ShardCut("run", 2, 2, (), (), Position(1, 0, ""), cut, {})
    arrays = {"theta-000": np.full(64, cut % 256, np.uint8)}
    digest = write_syncer_part(out.cuts, "run", cut, cut, msgspec.msgpack.encode(state), arrays)
    write_manifest(out.cuts, Manifest("run", cut, cut, digest, {}, {}, shards))
    return digest


class Sides:
    def __init__(self, folder: Path) -> None:
        url = f"file://{folder}/bucket"
        self.bucket, self.own = open_bucket(url), open_bucket(shard_url(url, 2))
        self.lead_dir, self.shard_dir = RunDir(folder / "run"), RunDir(folder / "run" / "shards" / "2")
        for out in (self.lead_dir, self.shard_dir):
            out.cuts.mkdir(parents=True)
        self.lead = LeadCutCopy(
            self.bucket, self.lead_dir, read_listing({}), 2, lambda: None, kind=ShardCut, shards=[self.own]
        )
        self.shard = ShardCutCopy(self.own, self.shard_dir, read_listing({}), 0, lambda: None, lead=self.bucket)

    def take_cut(self, cut: int) -> None:
        write_part(self.lead_dir, cut, (write_part(self.shard_dir, cut),))


def list_complete(bucket: Bucket) -> list[int]:
    return [key.cut for key in read_listing(bucket.list_objects()).complete_cuts()]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def test_a_cut_is_whole_at_the_lead_once_every_shard_has_put_its_part(sides: Sides) -> None:
    sides.take_cut(10)
    assert not sides.shard.put_newest_cut(), "the lead has not chosen it"
    assert not sides.lead.put_newest_cut() and sides.lead.held_cut == 10
    assert list_complete(sides.bucket) == []
    assert sides.shard.put_newest_cut() and list_complete(sides.own) == [10]
    assert sides.lead.put_newest_cut() and sides.lead.held_cut == -1
    assert list_complete(sides.bucket) == [10]


def test_all_stay_with_the_cut_that_the_lead_has_begun(sides: Sides) -> None:
    sides.take_cut(10)
    sides.lead.put_newest_cut()
    sides.take_cut(20)
    assert sides.shard.put_newest_cut() and list_complete(sides.own) == [10]
    assert sides.lead.put_newest_cut() and list_complete(sides.bucket) == [10]
    assert not sides.lead.put_newest_cut()
    assert sides.shard.put_newest_cut() and sides.lead.put_newest_cut()
    assert list_complete(sides.bucket) == list_complete(sides.own) == [20, 10]


def test_a_part_that_the_manifest_does_not_name_does_not_count(sides: Sides) -> None:
    write_part(sides.lead_dir, 10, ("another",))
    write_part(sides.shard_dir, 10)
    sides.lead.put_newest_cut()
    assert sides.shard.put_newest_cut()
    assert not sides.lead.put_newest_cut() and list_complete(sides.bucket) == []


def test_the_lead_deletes_what_newer_cuts_make_needless_in_every_shard(sides: Sides) -> None:
    sides.own.put("journal/payload-000001-0005/000000000000-000000000004", b"gone")
    sides.own.put("journal/payload-000001-0020/000000000000-000000000004", b"kept")
    for cut in (10, 20, 30):
        sides.take_cut(cut)
        sides.lead.put_newest_cut()
        sides.shard.put_newest_cut()
        assert sides.lead.put_newest_cut()
    sides.lead.delete_needless()
    assert list_complete(sides.bucket) == list_complete(sides.own) == [30, 20]
    assert list(read_listing(sides.own.list_objects()).journal) == ["payload-000001-0020"]
