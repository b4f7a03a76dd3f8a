"""Check that a journal reaches its durable end, and accept that it does not.

A journal that lost its last appends reads like one that ends there: a chain of hashes knows no end. So it is held
against its mark (end_mark.py). With M for the newest mark:

    | the journal                                   | how that comes about                                 | verdict |
    | --------------------------------------------- | ---------------------------------------------------- | ------- |
    | ends at M                                     | the usual case                                       | whole   |
    | goes on behind M                              | a crash between an append and its mark; with         | whole   |
    |                                               | durability = "cut" the rounds since the last sync    |         |
    | seals the term of M before M by a later term  | M's writer was replaced: what it wrote it told nobody | whole   |
    | has no mark, or the torn first one of a run   | an earlier version wrote it; or nothing was told yet | whole   |
    | ends before M, or its segment is gone         | appends that were durable are gone                   | lost    |
    | has something else at M                       | files of a copy that went on by itself               | lost    |
    | has a mark with two bad slots                 | the mark is damaged: no crash does that              | lost    |

- The mark is read first and the journal after it: a living writer may be ahead of the mark that was read, never behind.
- What is lost is never passed over: verify and whoever would go on refuse it, until the operator accepts it. Then the
  mark is set back to the end that is there, and accepted.json keeps what is missing until a LossRecord says it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.protocol.records import MergedRecord, RestoredRecord
from atoll.store.atomic import make_folder, write_atomic
from atoll.store.cuts import BadCut, CutState, folder_of, known_cuts, open_cut, read_state
from atoll.store.disk import Corrupt, Disk, DiskFailed, LocalDisk
from atoll.store.end_mark import BadMark, DurableEnd, place_mark, read_mark, rounds_behind
from atoll.store.journal import describe_lack, read
from atoll.store.rundir import RunDir
from atoll.store.segments import ORIGIN, Position, segment_path
from atoll.store.shards import ShardCut

ACCEPTED = "accepted.json"
"""Name of a file beside the marks."""
LOST = "lost-"
"""Prefix of the folders of snapshots that the journal does not reach any more."""

UNMARKED = "no mark says up to where the journal was durable, so its last appends may be missing: from now on one does"
"""Remark on a run that an earlier version wrote; its next append is marked."""


class EndLost(Corrupt):
    """A part of the journal that was durable is gone. Nothing was changed."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; put back a copy of what is missing{advice}, or go on without it by --accept-loss")
        self.what = what


def check_end(out: RunDir, disk: Disk, *, shard: int = 0) -> DurableEnd | None:
    """EndLost where the journal does not reach its mark. Returns the mark; None: there is none. `shard`: the folder is
    that of another shard, which has a chain."""
    try:
        mark = read_mark(out.marks, disk)
    except BadMark as error:
        raise EndLost(str(error)) from error
    if mark is None or _holds(out, mark.position, shard, disk):
        return mark
    end = find_end(out, disk)
    if end.position.term > mark.position.term:
        return mark  # sealed by a later term: the writer of this mark was replaced
    raise EndLost(_describe(out.journal, end, mark, f"the chain of shard {shard}" if shard else "the journal", disk))


def _holds(out: RunDir, at: Position, shard: int, disk: Disk) -> bool:
    """Whether a record of the journal ends at this position. It is read from the newest snapshot on that it leads on
    from, so that what a start takes does not grow with the run."""
    for start in _list_starts(out, at, shard):
        try:
            return any(position == at for position, _ in read(out.journal, start=start, disk=disk))
        except (Corrupt, DiskFailed):
            continue  # an unreadable disk says so again when all of it is read
    return False


def _list_starts(out: RunDir, at: Position, shard: int) -> Iterator[Position | None]:
    for number in known_cuts(out.cuts):
        with suppress(BadCut):
            start = _read_position(out, number, shard)
            if (start.term, start.offset) < (at.term, at.offset):
                yield start
    yield None


def _read_position(out: RunDir, cut: int, shard: int) -> Position:
    """Return the position at which the journal goes on behind a snapshot."""
    kind: type[CutState] | type[ShardCut] = ShardCut if shard else CutState
    return read_state(out.cuts, cut, kind)[1].position


def find_end(out: RunDir, disk: Disk) -> DurableEnd:
    """Return the end of the journal as it is on the disk, read from its beginning."""
    end = DurableEnd(ORIGIN, 0)
    try:
        for position, record in read(out.journal, disk=disk):
            end = DurableEnd(position, rounds_behind([record], end.rounds))
    except DiskFailed as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    return end


def _describe(journal: Path, end: DurableEnd, mark: DurableEnd, called: str, disk: Disk) -> str:
    at, path = mark.position, segment_path(journal, mark.position.term)
    if end.position.term == at.term and end.position.offset >= at.offset:
        what = f"{path} holds something else at byte {at.offset} than what was durable"
    elif not _exists(path, disk):
        what = f"{path} is gone"
    else:
        there = end.position.offset if end.position.term == at.term else 0
        what = f"{path} holds {there:,} of {at.offset:,} bytes"
    if end.rounds >= mark.rounds:
        return f"{called} ends before what was durable: {what}"
    ends = f"ends at round {end.rounds - 1}" if end.rounds else "holds no round"
    return f"{called} {ends}, but round {mark.rounds - 1} was durable: {what}"


def _exists(path: Path, disk: Disk) -> bool:
    try:
        disk.size(path)
    except FileNotFoundError:
        return False
    return True


# ---- a payload that is missing, though its record is there ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LostPayload:
    before: Position
    """The end of what can be replayed."""
    what: str


def find_lost_payload(out: RunDir) -> LostPayload | None:
    """The first record behind the newest snapshot whose payload is not here whole: no state leads past it."""
    for cut in known_cuts(out.cuts):
        try:
            before = open_cut(out.cuts, cut).state.position
            for position, record in read(out.journal, start=before, disk=LocalDisk()):
                place = record.payload if isinstance(record, MergedRecord | RestoredRecord) else None
                if place is not None and (what := describe_lack(out.journal, position.term, place)):
                    return LostPayload(before, what)
                before = position
        except (BadCut, Corrupt):
            continue  # what leads on from the snapshot before it counts
        return None
    return None


# ---- what was accepted ----------------------------------------------------------------------------------------------


def cut_off(out: RunDir, end: Position) -> None:
    """Remove what the journal holds behind this position. What of an append is left counts as torn."""
    for path in out.journal.glob("segment-*.log"):
        if int(path.stem.rpartition("-")[2]) > end.term:
            path.unlink()
    with segment_path(out.journal, end.term).open("r+b") as file:
        file.truncate(end.offset)
        os.fsync(file.fileno())


def accept_end(out: RunDir, shard: int = 0) -> None:
    """Mark the end that is there. Snapshots from behind it are set aside as cuts/lost-000120."""
    end = find_end(out, LocalDisk())
    for number in known_cuts(out.cuts):
        with suppress(BadCut):
            start = _read_position(out, number, shard)
            if (start.term, start.offset) > (end.position.term, end.position.offset):
                folder = folder_of(out.cuts, number)
                folder.rename(folder.with_name(f"{LOST}{folder.name}"))
    place_mark(out.marks, end)


def write_accepted(out: RunDir, what: str) -> None:
    """Keep what was accepted until the journal says it."""
    make_folder(out.marks)
    write_atomic(out.marks / ACCEPTED, msgspec.json.encode({"what": what}))


def read_accepted(out: RunDir) -> str:
    """Return what was accepted and is not in the journal yet; empty: nothing."""
    try:
        return msgspec.json.decode((out.marks / ACCEPTED).read_bytes(), type=dict[str, str])["what"]
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.MsgspecError, LookupError):
        return "a part of the journal"  # which, the damaged file does not say


def clear_accepted(out: RunDir) -> None:
    (out.marks / ACCEPTED).unlink(missing_ok=True)
