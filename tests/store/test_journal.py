from __future__ import annotations

import copy
import errno
import struct
from pathlib import Path

import pytest
from tests.store.entries import (
    FIRST,
    PAYLOADS,
    check_payloads,
    contents,
    entry,
    flipped,
    passed,
    reign,
    written_by,
)
from tests.store.faulty import FOLDER, FaultyDisk, PowerCut

from atoll.digests import compute_digest
from atoll.protocol.records import AnyRecord, CutDoneRecord, MergedRecord, PayloadPlace, StartedRecord
from atoll.store.disk import Corrupt, Disk, DiskFailed, LocalDisk, NoRoom
from atoll.store.journal import ORIGIN, Journal, JournalEntry, payload, read, seal
from atoll.store.segments import HEAD_BYTES

# ---- what is written is read ----------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    return (LocalDisk(), tmp_path) if request.param == "local" else (FaultyDisk(), FOLDER)


def test_what_was_appended_is_read_back_with_its_payloads(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    journal = Journal.begin(folder, 1, disk=disk)
    first = journal.append([(StartedRecord("learner-0"), None)])
    second = journal.append([entry(0, b"abc"), passed(1), entry(2, b"defgh")])
    third = journal.append([entry(3)])
    end = journal.position
    journal.close()
    found = list(read(folder, disk=disk))
    assert [record for _, record in found] == [*first, *second, *third]
    assert found[-1][0] == end == seal(folder, disk=disk)
    places = [record.payload for record in (*second, *third) if isinstance(record, MergedRecord)]
    assert places[0] == PayloadPlace(0, 0, 3, compute_digest(b"abc"))
    assert [payload(folder, 1, at, disk=disk) for at in places if at is not None] == [b"abc", b"defgh"]
    assert places[2] is None


def test_a_journal_of_three_terms_is_read_in_one_go(place: tuple[Disk, Path]) -> None:
    disk, folder = place
    journal = Journal.begin(folder, 1, disk=disk)
    journal.append([entry(0)])
    for term in (2, 3):
        journal.close()
        journal = reign(disk, term, folder)
        journal.append([entry(term)])
    journal.close()
    kinds = [(position.term, type(record).__name__) for position, record in read(folder, disk=disk)]
    assert kinds == [
        (1, "MergedRecord"),
        (2, "TermRecord"),
        (2, "MergedRecord"),
        (3, "TermRecord"),
        (3, "MergedRecord"),
    ]


def test_an_empty_folder_holds_nothing() -> None:
    assert contents(FaultyDisk()) == []
    assert seal(FOLDER, disk=FaultyDisk()) == ORIGIN


def test_an_append_is_one_write_and_one_sync_with_its_payloads_before_it() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0, b"made with the file")])
    disk.calls.clear()
    journal.append([entry(1, b"one"), entry(2, b"two"), passed(3)])
    bin_name = PAYLOADS
    assert disk.calls == [
        ("write", bin_name),
        ("write", bin_name),
        ("sync", bin_name),
        ("write", FIRST),
        ("sync", FIRST),
    ]
    disk.calls.clear()
    journal.append([passed(4)])
    assert disk.calls == [("write", FIRST), ("sync", FIRST)]
    journal.append([])
    assert len(disk.calls) == 2


def test_without_sync_nothing_is_synced_until_somebody_asks() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    disk.calls.clear()
    journal.append([passed(0)], sync=False)
    assert disk.calls == [("write", FIRST)]
    journal.append([(CutDoneRecord(1, 1, (), ""), None)])
    disk.crash()
    assert len(contents(disk)) == 2


def test_payloads_of_any_shape_are_written_as_they_lie() -> None:
    disk = FaultyDisk()
    values = memoryview(struct.pack("<4i", 1, 2, 3, 4)).cast("i", (2, 2))
    (record,) = Journal.begin(FOLDER, 1, disk=disk).append([(entry(0)[0], values)])
    assert isinstance(record, MergedRecord) and record.payload is not None
    assert payload(FOLDER, 1, record.payload, disk=disk) == values.tobytes()


# ---- no room --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_bytes", [None, 1, 7])
def test_after_a_full_disk_a_new_try_leaves_the_same_bytes(most_bytes: int | None) -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0, b"before")])
    batch = [entry(1, b"payload of one"), passed(2), entry(3, b"payload of three")]
    smooth, writer = copy.deepcopy((disk, journal))
    written = writer.append(batch)
    names = sorted(smooth.names(FOLDER))
    for room in range(written_by(disk, journal, batch)):
        full, writer = copy.deepcopy((disk, journal))
        full.room_bytes, full.most_bytes = room, most_bytes
        with pytest.raises(NoRoom, match="make room"):
            writer.append(batch)
        assert all(full.bytes_of(name) == disk.bytes_of(name) for name in names), "cut back"
        assert writer.position == journal.position
        full.room_bytes = None
        assert writer.append(batch) == written
        assert all(full.bytes_of(name) == smooth.bytes_of(name) for name in names)


def test_what_did_not_fit_does_not_come_back_after_a_power_cut() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    size = len(disk.bytes_of(FIRST))
    disk.room_bytes = 40
    with pytest.raises(NoRoom):
        journal.append([entry(1), entry(2)])
    disk.room_bytes = None
    disk.until_power_cut = 5
    with pytest.raises(PowerCut):
        journal.append([passed(3)])
    disk.crash("forgotten")
    assert len(disk.bytes_of(FIRST)) == size
    assert contents(disk) == [passed(0)[0]]


def test_a_journal_begins_once_there_is_room() -> None:
    disk = FaultyDisk()
    for room in range(HEAD_BYTES):
        disk.room_bytes = room
        with pytest.raises(NoRoom):
            Journal.begin(FOLDER, 1, disk=disk)
        assert disk.names(FOLDER) == []
    disk.room_bytes = None
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    assert contents(disk) == [passed(0)[0]]


def test_a_payload_file_is_made_once_there_is_room() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    disk.room_bytes = 0
    with pytest.raises(NoRoom, match=r"payload-000001-0000\.bin"):
        journal.append([entry(0, b"abc")])
    disk.room_bytes = None
    check_payloads(disk, list(journal.append([entry(0, b"abc")])))


def test_a_full_disk_that_cannot_be_cut_back_ends_the_journal() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    disk.room_bytes, disk.truncate_error = 10, errno.EIO
    for _ in range(2):
        with pytest.raises(DiskFailed, match=rf"cannot cut back .*{FIRST}"):
            journal.append([passed(0)])


# ---- a failed disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "name"), [(passed(0), FIRST), (entry(0, b"abc"), PAYLOADS)])
def test_after_a_failed_sync_nothing_more_is_written(first: JournalEntry, name: str) -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(9, b"makes the payload file")])
    disk.sync_error = errno.EIO
    with pytest.raises(DiskFailed) as caught:
        journal.append([first])
    assert f"cannot make durable {FOLDER / name}: Input/output error" in str(caught.value)
    assert "start the syncer again" in str(caught.value) and "\n" not in str(caught.value)
    disk.sync_error = 0
    disk.calls.clear()
    for again in (lambda: journal.append([passed(1)]), journal.rotate, lambda: journal.trim(1, 0)):
        with pytest.raises(DiskFailed, match="cannot make durable"):
            again()
    assert disk.calls == []


def test_a_name_that_cannot_be_made_durable_ends_the_journal() -> None:
    disk = FaultyDisk()
    disk.sync_error = errno.EIO
    with pytest.raises(DiskFailed):
        Journal.begin(FOLDER, 1, disk=disk)
    disk.sync_error = 0
    journal = Journal.begin(FOLDER, 1, disk=disk)
    disk.sync_error = errno.EIO
    with pytest.raises(DiskFailed, match=f"cannot make durable {FOLDER}: "):
        journal.append([entry(0, b"abc")])
    disk.sync_error = 0
    with pytest.raises(DiskFailed):
        journal.append([passed(1)])


def test_a_new_payload_file_is_found_after_a_power_cut() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0, b"abc")])
    journal.rotate()
    journal.append([entry(1, b"def")])
    disk.crash()
    found = contents(disk)
    assert len(found) == 2
    check_payloads(disk, found)


@pytest.mark.parametrize("durable", ["sync", "append"])
def test_rotating_waits_for_no_disk_and_what_was_written_before_is_durable_with_what_follows(durable: str) -> None:
    """It is done on an event loop, in the middle of a run that waits for cuts only."""
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0, b"abc")], sync=False)
    disk.calls.clear()
    journal.rotate()
    assert disk.calls == []
    journal.append([entry(1, b"def")], sync=False)
    disk.calls.clear()
    if durable == "sync":
        journal.sync()
        assert disk.calls == [("sync", PAYLOADS), ("sync", "payload-000001-0001.bin"), ("sync", FIRST)]
    else:
        journal.append([passed(2)])
        assert disk.calls[:2] == [("sync", PAYLOADS), ("sync", "payload-000001-0001.bin")]
    disk.crash()
    found = contents(disk)
    assert len(found) == (2 if durable == "sync" else 3)
    check_payloads(disk, found)


def test_an_append_that_was_interrupted_is_the_last() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    disk.until_power_cut = 3
    with pytest.raises(PowerCut):
        journal.append([passed(0)])
    disk.until_power_cut = None
    with pytest.raises(DiskFailed, match=f"{FIRST} was interrupted"):
        journal.append([passed(0)])


def test_a_closed_journal_takes_nothing() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.close()
    with pytest.raises(DiskFailed, match="is closed"):
        journal.append([passed(0)])


# ---- payload files --------------------------------------------------------------------------------------------------


def test_rotating_starts_a_file_and_trimming_deletes_those_before() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0, b"a")])
    assert (journal.rotate(), journal.file) == (1, 1)
    journal.append([entry(1, b"b")])
    journal = reign(disk, 2)
    kept: list[AnyRecord] = []
    for round in range(3):
        kept = list(journal.append([entry(round, b"c")]))
        journal.rotate()
    journal.trim(2, 2)
    left = sorted(name for name in disk.names(FOLDER) if name.startswith("payload"))
    assert left == ["payload-000002-0002.bin"]
    assert isinstance(kept[0], MergedRecord) and kept[0].payload is not None
    assert payload(FOLDER, 2, kept[0].payload, disk=disk) == b"c"
    assert len(contents(disk)) == 6, "the records stay"


def test_trimming_leaves_the_files_of_later_terms_alone() -> None:
    disk = FaultyDisk()
    replaced = Journal.begin(FOLDER, 1, disk=disk)
    replaced.append([entry(0, b"a")])
    reign(disk, 2).append([entry(1, b"b")])
    replaced.rotate()
    replaced.trim(1, 1)
    assert [name for name in disk.names(FOLDER) if name.startswith("payload")] == ["payload-000002-0000.bin"]
    with pytest.raises(AssertionError):
        replaced.trim(1, 2)
    with pytest.raises(AssertionError):
        replaced.trim(2, 0)


def test_every_flipped_bit_of_a_payload_is_found() -> None:
    disk = FaultyDisk()
    (record,) = Journal.begin(FOLDER, 1, disk=disk).append([entry(0, b"values of an outer gradient")])
    assert isinstance(record, MergedRecord) and record.payload is not None
    name = PAYLOADS
    data = disk.bytes_of(name)
    for bit in range(8 * len(data)):
        disk.put(name, flipped(data, bit))
        with pytest.raises(Corrupt, match=rf"{name} is damaged at byte 0"):
            payload(FOLDER, 1, record.payload, disk=disk)
    disk.put(name, data[:-1])
    with pytest.raises(Corrupt, match="it holds 26 of the 27 bytes"):
        payload(FOLDER, 1, record.payload, disk=disk)
    disk.put(name, data + b"garbage without a record")
    assert payload(FOLDER, 1, record.payload, disk=disk) == data
    disk.remove(FOLDER / name)
    with pytest.raises(Corrupt, match=f"{name} is missing"):
        payload(FOLDER, 1, record.payload, disk=disk)
