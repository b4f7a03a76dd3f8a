"""Which records are durable before anybody hears of them, by each `durability`, against a table written by hand.

The table is that of docs/protocol.md ("What is durable before anybody hears of it?"). What really happens is seen from
outside: what a power cut leaves at the moment at which an effect behind the record is carried out.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.store.faulty import FaultyDisk

from atoll.bucket.uploader import JournalMark
from atoll.config import Config, Service
from atoll.numerics import kernels
from atoll.protocol import records as r
from atoll.protocol.effects import Note
from atoll.protocol.errors import AtollError
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.store.journal import payload, read
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer import process
from atoll.syncer.effect_queue import EffectQueue
from atoll.syncer.run_store import RunStore

SETTINGS = Settings(learners=1, fragments=2, sync_every=4)
BEGUN = r.BegunRecord("run", SETTINGS, {"lr": 0.6}, (), "plan")
DURABILITIES = ("round", "cut", "store")

ALWAYS, NOT_WITH_CUT = {"round", "cut", "store"}, {"round", "store"}
TABLE: dict[type[r.Record], tuple[r.Record, set[str]]] = {
    r.BegunRecord: (BEGUN, NOT_WITH_CUT),
    r.TermRecord: (r.TermRecord(2, 0, "", 0), NOT_WITH_CUT),
    r.LossRecord: (r.LossRecord("the journal ends at round 1"), NOT_WITH_CUT),
    r.JoinedRecord: (r.JoinedRecord("a", 1, "session", 0), NOT_WITH_CUT),
    r.OwnedRecord: (r.OwnedRecord("a", "token"), NOT_WITH_CUT),
    r.StartedRecord: (r.StartedRecord("a"), NOT_WITH_CUT),
    r.MergedRecord: (r.MergedRecord(0, 0, 1, 1, "all reported", (), "digest"), NOT_WITH_CUT),
    r.PassedRecord: (r.PassedRecord(0, 0, "nobody had steps left"), NOT_WITH_CUT),
    r.ResetRecord: (r.ResetRecord(0, "not finite"), NOT_WITH_CUT),
    r.ScoredRecord: (r.ScoredRecord(1, 0.5), NOT_WITH_CUT),
    r.RestoredRecord: (r.RestoredRecord(0, 1, (1, 1), ("", ""), (), "bad"), ALWAYS),
    r.SourcesRecord: (r.SourcesRecord((("text", 10, 1.0),), 1), NOT_WITH_CUT),
    r.GrantedRecord: (r.GrantedRecord(0, 0, 0, 0, 5, "a", 1), NOT_WITH_CUT),
    r.GoneRecord: (r.GoneRecord("a", 1, 0, 0, (0, 0), (0, 0)), NOT_WITH_CUT),
    r.AlarmedRecord: (r.AlarmedRecord("a", 1, "30 tokens too many"), NOT_WITH_CUT),
    r.ChangedRecord: (r.ChangedRecord(SETTINGS, {"lr": 0.5}, "lr"), NOT_WITH_CUT),
    r.CutDoneRecord: (r.CutDoneRecord(1, 1, ("a",), "digest"), NOT_WITH_CUT),
    r.PlayedRecord: (r.PlayedRecord(()), NOT_WITH_CUT),
    r.LentRecord: (r.LentRecord("ticket", "a", 1, 3), NOT_WITH_CUT),
    r.DrawnRecord: (r.DrawnRecord("p", "q", 1, 8, 0, 1.0, 9, 0.9, ()), NOT_WITH_CUT),
    r.EndedRecord: (r.EndedRecord("100 steps are done"), ALWAYS),
    r.TailRecord: (r.TailRecord(1, (0, 0), (1, 1), ("", "")), ALWAYS),
}
"""One of each kind, and with which durability it is durable before it is told."""
VALUES = b"values"
WITH_VALUES = (r.MergedRecord, r.RestoredRecord)


class Bucket:
    """Stands for the uploader with `durability = "store"`: an append returns when the bucket has it."""

    told_after_put, deposed, held_cut = True, False, -1

    def __init__(self) -> None:
        self.segment_bytes = 0

    def note_append(self, mark: JournalMark) -> None:
        self.segment_bytes = mark.segment_bytes

    def stop(self) -> None:
        pass


def test_the_table_names_every_kind_of_record() -> None:
    assert set(TABLE) == set(get_args(r.AnyRecord))


@pytest.mark.parametrize("durability", DURABILITIES)
def test_what_was_told_survives_as_the_table_says(tmp_path: Path, durability: str) -> None:
    """Each kind in a journal of its own, behind a first record that is not synced with `cut`."""
    survived = {
        kind for kind, (record, _) in TABLE.items() if tell_and_cut_power(tmp_path / kind.__name__, record, durability)
    }
    assert survived == {kind for kind, (_, durable) in TABLE.items() if durability in durable}


def tell_and_cut_power(path: Path, record: Any, durability: str) -> bool:
    """Return whether this record is there after a power cut at the moment at which an effect behind it is told."""
    disk, bucket, out = FaultyDisk(), Bucket() if durability == "store" else None, RunDir.create(path)
    every_round = {"round": True, "cut": False, "store": True}[durability]
    store = RunStore(out, acquire(out.journal), every_round=every_round, disk=disk, uploader=bucket)  # type: ignore[arg-type]
    first = [] if isinstance(record, r.BegunRecord) else [BEGUN]
    left: list[FaultyDisk] = []

    def tell(effect: fx.SyncerEffect) -> None:
        if isinstance(effect, Note):
            left.append(copy.deepcopy(disk))
            left[-1].crash()
            assert bucket is None or bucket.segment_bytes == disk.size(segment), "the bucket lacks what is told"

    segment = out.journal / "segment-000001.log"
    has_values = isinstance(record, WITH_VALUES)
    queue = EffectQueue(
        store.append,
        carry_out=tell,
        payload=lambda persist: memoryview(VALUES) if persist.records[-1] is record and has_values else None,
        first_cut=no_first_cut,
    )

    async def write() -> None:
        async with asyncio.timeout(30.0), asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(queue.run())
            for one in first:
                queue.enqueue([fx.Persist((one,))])
                await queue.wait_until_empty()
            queue.enqueue([fx.Persist((record,)), Note("told", "of it", {})])
            await queue.wait_until_empty()
            writing.cancel()

    asyncio.run(write())
    store.close()
    [after] = left
    kept = [(at, one) for at, one in read(out.journal, disk=after) if type(one) is type(record)]
    for at, one in kept if has_values else ():
        assert payload(out.journal, at.term, one.payload, disk=after) == VALUES, (
            "a record that is kept finds its values"
        )
    return bool(kept)


async def no_first_cut(cut: fx.TakeCut) -> None:
    raise AssertionError(f"nobody takes cut {cut.cut}")


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_syncer_asks_its_store_for_the_durability_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    asked: list[bool] = []

    def begin(out: RunDir, lease: object, *, every_round: bool, **_: object) -> None:
        asked.append(every_round)
        raise AtollError("that is all this test wants to know")

    monkeypatch.setattr(process, "RunStore", begin)
    monkeypatch.setattr(kernels, "warm", lambda: None)
    monkeypatch.setattr(process, "make_uploader", lambda *_, **__: Bucket())
    service = Service(durability=durability, store="s3://bucket/run" if durability == "store" else "")  # type: ignore[arg-type]
    process.serve(Config(service=service), RunDir.create(tmp_path / "run"), evaluated=False)
    assert asked == [durability != "cut"]
