"""Records to append, and words to say what a journal on a disk of the tests holds."""

from __future__ import annotations

import copy
from pathlib import Path

from hypothesis import strategies as st
from tests.store.faulty import FOLDER, FaultyDisk

from atoll.protocol.records import (
    AnyRecord,
    EndedRecord,
    GoneRecord,
    GrantedRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
    Share,
    TermRecord,
)
from atoll.store.disk import Disk
from atoll.store.journal import Journal, JournalEntry, Position, TornTail, payload, read, seal

FIRST, SECOND, THIRD = (f"segment-00000{term}.log" for term in (1, 2, 3))
PAYLOADS = "payload-000001-0000.bin"


def entry(round: int, values: bytes = b"") -> JournalEntry:
    share = Share("learner-0", 1, 40 + round, 3, 96, 3072.0, round)
    merged = MergedRecord(round, round % 4, round + 1, 0, "every live learner reported", (share,), f"{round:032x}")
    return merged, memoryview(values) if values else None


def passed(round: int) -> JournalEntry:
    return PassedRecord(round, round % 4, "no quorum"), None


def granted(lease: int) -> JournalEntry:
    """A record that ends in zeros."""
    return GrantedRecord(lease, 0, 0, 0, 64, "learner-0", 2**56), None


def contents(disk: Disk, folder: Path = FOLDER, start: Position | None = None) -> list[AnyRecord]:
    return [record for _, record in read(folder, start=start, disk=disk)]


def tails(disk: Disk) -> list[TornTail]:
    found: list[TornTail] = []
    for _ in read(FOLDER, disk=disk, on_tail=found.append):
        pass
    return found


def reign(disk: Disk, term: int, folder: Path = FOLDER) -> Journal:
    """The journal of a successor that has written its first record."""
    end = seal(folder, disk=disk)
    journal = Journal.begin(folder, term, after=end, disk=disk)
    journal.append([(TermRecord(term, end.offset, end.hash, 0), None)])
    return journal


def check_payloads(disk: Disk, found: list[AnyRecord]) -> None:
    """Every record of term 1 finds its payload, or this is Corrupt."""
    for record in found:
        if isinstance(record, MergedRecord) and record.payload is not None:
            payload(FOLDER, 1, record.payload, disk=disk)


def written_by(disk: FaultyDisk, journal: Journal, entries: list[JournalEntry]) -> int:
    """How many bytes an append takes."""
    disk, journal = copy.deepcopy((disk, journal))
    disk.room_bytes = room = 2**30
    journal.append(entries)
    return room - disk.room_bytes


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---- any entries ----------------------------------------------------------------------------------------------------

_counts = st.integers(0, 2**40)
_names = st.text("abc-0\0", min_size=1, max_size=6)
_shares = st.builds(Share, _names, _counts, _counts, _counts, _counts, st.floats(allow_nan=False), _counts)
_merged = st.builds(MergedRecord, _counts, _counts, _counts, _counts, _names, st.tuples(_shares), _names)
_others: st.SearchStrategy[AnyRecord] = st.one_of(
    st.builds(JoinedRecord, _names, _counts, _names, _counts),
    st.builds(PassedRecord, _counts, _counts, _names),
    st.builds(GrantedRecord, *[_counts] * 5, _names, _counts),
    st.builds(GoneRecord, _names, _counts, _counts, _counts, st.tuples(_counts), st.tuples(_counts)),
    st.builds(EndedRecord, _names),
)
_payloads = st.one_of(st.none(), st.binary(max_size=20).map(lambda data: memoryview(data)))

batches: st.SearchStrategy[list[JournalEntry]] = st.lists(
    st.one_of(st.tuples(_others, st.none()), st.tuples(_merged, _payloads)), min_size=1, max_size=3
)
