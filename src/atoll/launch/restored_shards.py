"""Of a run of several shards that was brought back from its bucket: what all of it agrees on, and a new run of that.

The lead's journal decides, and names what each shard's chain must hold (docs/adr/0031). In the bucket each part of the
syncer is as far as its own uploads came, so the lead's may name what a shard's copy lacks: then the journal here is
cut off before that. What is left is one state of the whole run, and the same for whoever reads the bucket.
"""

from __future__ import annotations

import shutil

import msgspec
import numpy as np

from atoll.protocol import records
from atoll.protocol.history import HistoryState
from atoll.protocol.records import BegunRecord, MergedRecord
from atoll.protocol.shard_messages import TakeUp, decision_of
from atoll.store.cuts import (
    ABSENT,
    BadCut,
    Manifest,
    complete_cuts,
    open_cut,
    read_state,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.durable_end import cut_off
from atoll.store.journal import ORIGIN, Journal, payload_path, read
from atoll.store.rundir import RunDir
from atoll.store.segments import Position
from atoll.store.shards import ShardCut
from atoll.store.writer_lease import acquire
from atoll.syncer.shard_store import ShardStore


def cut_to_common(draft: RunDir, shards: int) -> int:
    """Cut the lead's journal off before the first round that a shard's copy does not hold; how many rounds went. What
    counts is behind the newest cut that all of them lead on from. BadCut or Corrupt: there are cuts, but none such."""
    trouble: BadCut | Corrupt | None = None
    for cut in complete_cuts(draft.cuts):
        try:
            start = open_cut(draft.cuts, cut).state.position
            held = {shard: _list_held(draft.shard(shard), cut) for shard in range(2, shards + 1)}
            return _cut_behind(draft, start, held)
        except (BadCut, Corrupt) as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble
    return 0


def _cut_behind(draft: RunDir, start: Position, held: dict[int, set[str]]) -> int:
    before, missing = start, 0
    for position, record in read(draft.journal, start=start, disk=LocalDisk()):
        if isinstance(record, MergedRecord) and (missing or not _is_held(record, held)):
            missing += 1
        if not missing:
            before = position
    if missing:
        cut_off(draft, before)
    return missing


def _list_held(shard: RunDir, cut: int) -> set[str]:
    """The heads behind records of a chain, as far as their payloads are here."""
    _, state = read_state(shard.cuts, cut, ShardCut)
    found: set[str] = set()
    for position, record in read(shard.journal, start=state.position, disk=LocalDisk()):
        if isinstance(record, MergedRecord) and (place := record.payload) is not None:
            path = payload_path(shard.journal, position.term, place.file)
            if path.exists() and path.stat().st_size >= place.offset + place.length:
                found.add(position.hash)
    return found


def _is_held(record: MergedRecord, held: dict[int, set[str]]) -> bool:
    named = ((shard, record.heads[shard - 1]) for shard in held)
    return all(not head or head in held[shard] for shard, head in named)


def begin_shards_anew(draft: RunDir, old: BegunRecord, history: HistoryState, cut: int) -> tuple[str, ...]:
    """Every other shard's part of a new run, as it was at the end of the lead's journal, which is still there: a chain
    of its own, and a part of that cut. The digests of their tables."""
    return tuple(_begin_shard(draft, old, history, shard, cut) for shard in range(2, old.shards + 1))


def _begin_shard(draft: RunDir, old: BegunRecord, history: HistoryState, shard: int, cut: int) -> str:
    out, before = draft.shard(shard), next(iter(complete_cuts(draft.cuts)))
    lease = acquire(out.journal)
    store = ShardStore(out, lease, shard)
    start = open_cut(draft.cuts, before).state.position
    since = (decision_of(record, shard) for _, record in read(draft.journal, start=start, disk=LocalDisk()))
    decisions = tuple(one for one in since if one is not None)
    parameters, _ = store.take_up(TakeUp(begun=records.encode(old), cut=before, decisions=decisions))
    begun, buffers = history.begun, parameters.committed_buffers()
    store.close()
    arrays = {name: np.ascontiguousarray(values).view(np.uint8) for name, values in parameters.hold_arrays().items()}
    clear_written(out)
    journal = Journal.begin(out.journal, lease.term, after=ORIGIN, disk=LocalDisk(), marks=out.marks)
    journal.append([(begun, None)])
    journal.close()
    versions, rounds = tuple(one.version for one in buffers), tuple(one.round for one in buffers)
    state = ShardCut(begun.run, shard, begun.shards, versions, rounds, journal.position, 0, history.outer)
    digest = write_syncer_part(out.cuts, begun.run, cut, cut, msgspec.msgpack.encode(state), arrays)
    write_manifest(out.cuts, Manifest(begun.run, cut, cut, digest, {}))
    return digest


def clear_written(out: RunDir) -> None:
    """Journal, marks and cuts; claims of terms stay."""
    for path in [path for path in out.journal.iterdir() if path.is_file()]:
        path.unlink()
    shutil.rmtree(out.marks, ignore_errors=True)
    (out.cuts / ABSENT).unlink(missing_ok=True)
    for folder in out.cuts.iterdir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
