"""A journal over several terms: what counts of a predecessor, and reading from a position on."""

from __future__ import annotations

import copy

import pytest
from tests.store.entries import (
    FIRST,
    SECOND,
    THIRD,
    contents,
    entry,
    passed,
    reign,
    tails,
)
from tests.store.faulty import FOLDER, FaultyDisk, PowerCut

from atoll.protocol import records
from atoll.protocol.records import PassedRecord, TermRecord
from atoll.store.disk import Corrupt, DiskFailed
from atoll.store.journal import ORIGIN, Journal, Position, read, seal
from atoll.store.segments import HEAD_BYTES, MAGIC


def test_late_writes_of_a_replaced_syncer_are_ignored() -> None:
    disk = FaultyDisk()
    replaced = Journal.begin(FOLDER, 1, disk=disk)
    replaced.append([passed(0)])
    before = disk.bytes_of(FIRST)
    successor = reign(disk, 2)
    assert disk.bytes_of(FIRST) == before, "a seal changes nothing in the predecessor's file"
    replaced.append([passed(1)])
    successor.append([passed(2)])
    replaced.append([passed(3)])
    assert [record.round for record in contents(disk) if isinstance(record, PassedRecord)] == [0, 2]
    assert seal(FOLDER, disk=disk) == successor.position


def test_a_torn_end_is_sealed_off() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    disk.put(FIRST, disk.bytes_of(FIRST) + b"\x30\0\0\0 torn")
    reign(disk, 2)
    assert [type(record) for record in contents(disk)] == [PassedRecord, TermRecord]
    assert tails(disk) == []


def test_a_segment_whose_writer_came_too_late_is_ignored() -> None:
    """Terms 2 and 3 are claimed while nobody has written; 3 reads and begins first, then 2 wakes up."""
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    end = seal(FOLDER, disk=disk)
    current = reign(disk, 3)
    late = Journal.begin(FOLDER, 2, after=end, disk=disk)
    late.append([(TermRecord(2, end.offset, end.hash, 0), None), passed(66)])
    current.append([passed(1)])
    reign(disk, 4).append([passed(2)])
    found = contents(disk)
    assert [record.round for record in found if isinstance(record, PassedRecord)] == [0, 1, 2]
    assert [record.term for record in found if isinstance(record, TermRecord)] == [3, 4]
    with pytest.raises(Corrupt, match="it follows term 1 and not the start, term 2"):
        contents(disk, start=late.position)


def test_what_a_successor_builds_on_is_made_durable_first() -> None:
    """The predecessor was stopped between its write and its datasync; then the power fails."""
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)], sync=False)
    reign(disk, 2)
    disk.crash("forgotten")
    assert [type(record) for record in contents(disk)] == [PassedRecord, TermRecord]


def test_part_of_an_append_is_never_sealed_in() -> None:
    """The predecessor was stopped between a short write and cutting it back: its first record is whole by then."""
    disk = FaultyDisk()
    replaced = Journal.begin(FOLDER, 1, disk=disk)
    disk.until_power_cut = len(records.encode(passed(0)[0])) + 30
    with pytest.raises(PowerCut):
        replaced.append([passed(0), passed(1)])
    disk.until_power_cut = None
    assert tails(disk) != [] and seal(FOLDER, disk=disk) == ORIGIN


def test_a_later_term_begins_with_the_record_that_names_its_seal() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    end = seal(FOLDER, disk=disk)
    journal = Journal.begin(FOLDER, 2, disk=disk)
    for wrong in (passed(1)[0], TermRecord(2, end.offset - 1, end.hash, 0), TermRecord(3, end.offset, end.hash, 0)):
        with pytest.raises(AssertionError):
            journal.append([(wrong, None)])
    journal.append([(TermRecord(2, end.offset, end.hash, 0), None)])
    journal.append([passed(1)])
    assert len(contents(disk)) == 3


def test_a_first_record_that_contradicts_its_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    monkeypatch.setattr(Journal, "_check_first", lambda self, record: None)
    Journal.begin(FOLDER, 2, disk=disk).append([passed(1)])
    with pytest.raises(Corrupt, match=rf"{SECOND} is damaged at byte {HEAD_BYTES}, record 1"):
        contents(disk)


def test_a_segment_is_begun_once() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    with pytest.raises(DiskFailed, match=rf"{FIRST}: File exists"):
        Journal.begin(FOLDER, 1, after=ORIGIN, disk=disk)
    assert len(contents(disk)) == 1


def test_a_segment_under_another_name_is_found() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    for term in (2, 3):
        reign(disk, term)
    for name, taken in (
        (FIRST, THIRD),
        (SECOND, THIRD),
        (SECOND, FIRST),
        (THIRD, SECOND),
        ("segment-000004.log", FIRST),
    ):
        other = copy.deepcopy(disk)
        other.put(name, disk.bytes_of(taken))
        with pytest.raises(Corrupt):
            contents(other)


# ---- from a position on ---------------------------------------------------------------------------------------------


def test_reading_from_a_position_touches_only_what_lies_behind_it() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0), entry(1)])
    journal = reign(disk, 2)
    for round in range(20):
        journal.append([entry(2 * round), passed(2 * round + 1)])
    reign(disk, 3).append([passed(99)])
    everything = list(read(FOLDER, disk=disk))
    for index, (start, _) in enumerate(everything):
        disk.reads.clear()
        assert list(read(FOLDER, start=start, disk=disk)) == everything[index + 1 :]
        for name, first, last in disk.reads:
            term, is_number = int(name[8:14]), (first, last) == (0, len(MAGIC))  # of the format
            assert term > start.term or (term == start.term and (first >= start.offset or is_number))
        assert seal(FOLDER, start=start, disk=disk) == everything[-1][0]


def test_a_start_that_does_not_fit_is_found() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    start = journal.position
    journal.append([passed(1)])
    with pytest.raises(Corrupt):
        contents(disk, start=Position(1, start.offset, bytes(16).hex()))
    beyond = Position(1, journal.position.offset + 1, journal.position.hash)
    with pytest.raises(Corrupt, match=f"the file ends at byte {journal.position.offset} already"):
        contents(disk, start=beyond)
    with pytest.raises(Corrupt, match=r"segment-000007\.log is missing"):
        contents(disk, start=Position(7, start.offset, start.hash))


def test_a_start_behind_the_seal_is_found() -> None:
    disk = FaultyDisk()
    replaced = Journal.begin(FOLDER, 1, disk=disk)
    replaced.append([passed(0)])
    reign(disk, 2)
    replaced.append([passed(1)])
    with pytest.raises(Corrupt, match="where its successor sealed it"):
        contents(disk, start=replaced.position)
