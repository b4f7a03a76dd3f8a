from __future__ import annotations

import copy
import errno
import hashlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.entries import (
    FIRST,
    SECOND,
    THIRD,
    batches,
    check_payloads,
    contents,
    entry,
    flipped,
    granted,
    passed,
    reign,
    tails,
    written_by,
)
from tests.store.faulty import FOLDER, FaultyDisk, Left, PowerCut

from atoll.protocol import records
from atoll.protocol.records import MergedRecord, PassedRecord, TermRecord
from atoll.store.disk import Corrupt, DiskFailed
from atoll.store.journal import ORIGIN, Journal, JournalEntry, Position, TornTail, payload, read, seal
from atoll.store.segments import GARBAGE_BYTES, HEAD_BYTES, LONGEST_BYTES, MAGIC


def test_the_bytes_are_what_the_documentation_says() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0), passed(1)])
    chain, head = bytes(16), MAGIC + struct.pack("<IIQ16s", 1, 0, 0, bytes(16))
    expected = head + hashlib.blake2b(head, digest_size=16).digest()
    for (record, _), closing in ((passed(0), b","), (passed(1), b"\n")):
        body = records.encode(record)
        chain = hashlib.blake2b(chain + body, digest_size=16).digest()
        expected += struct.pack("<I", len(body)) + chain + body + closing
    assert disk.bytes_of(FIRST) == expected
    assert journal.position == Position(1, len(expected), chain.hex())


def test_a_journal_of_another_format_is_refused_by_that_name() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    at = journal.position
    journal.append([passed(1)])
    head = b"atoll journal 2\n" + disk.bytes_of(FIRST)[len(MAGIC) : HEAD_BYTES - 16]
    disk.put(FIRST, head + hashlib.blake2b(head, digest_size=16).digest() + disk.bytes_of(FIRST)[HEAD_BYTES:])
    for start in (None, at):
        with pytest.raises(Corrupt, match=r"was written by another version of Atoll: go on with the run with that"):
            list(read(FOLDER, start=start, disk=disk))


# ---- power cuts -----------------------------------------------------------------------------------------------------

LEFT: tuple[Left | dict[str, Left], ...] = (
    "forgotten",
    "kept",
    "grown",
    {"segment": "kept", "payload": "forgotten"},
    {"segment": "grown", "payload": "forgotten"},
)


@settings(max_examples=4)  # each is a cut at every one of its bytes, five times
@given(before=st.lists(batches, max_size=2), last=batches)
def test_a_power_cut_at_any_byte_leaves_whole_appends(
    before: list[list[JournalEntry]], last: list[JournalEntry]
) -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    acknowledged = [record for batch in before for record in journal.append(batch)]
    whole = copy.deepcopy((disk, journal))[1].append(last)
    size = written_by(disk, journal, last)
    for survives in range(size + 1):
        broken, writer = copy.deepcopy((disk, journal))
        broken.until_power_cut = survives
        with pytest.raises(PowerCut):
            writer.append(last)
        for left in LEFT:
            after = copy.deepcopy(broken)
            after.crash(left)
            found = contents(after)
            assert found in (acknowledged, [*acknowledged, *whole]), (survives, left)
            check_payloads(after, found)


@settings(max_examples=10)
@given(before=batches, last=batches)
def test_a_successor_goes_on_after_a_power_cut_at_any_byte(
    before: list[JournalEntry], last: list[JournalEntry]
) -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    acknowledged = list(journal.append(before))
    for survives in range(0, written_by(disk, journal, last), 7):
        broken, writer = copy.deepcopy((disk, journal))
        broken.until_power_cut = survives
        with pytest.raises(PowerCut):
            writer.append(last)
        broken.crash("kept")
        (successor,) = reign(broken, 2).append([passed(9)])
        assert [record for record in contents(broken) if not isinstance(record, TermRecord)] == [
            *acknowledged,
            successor,
        ]


def test_a_power_cut_while_a_journal_begins_leaves_what_was_before() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    for survives in range(HEAD_BYTES + 1):
        for left in LEFT[:3]:
            broken = copy.deepcopy(disk)
            broken.until_power_cut = survives
            with pytest.raises(PowerCut):
                reign(broken, 2)
            broken.crash(left, names_kept=True)
            assert contents(broken) == [passed(0)[0]]
            reign(broken, 3)
            assert [type(record) for record in contents(broken)] == [PassedRecord, TermRecord]


def test_the_segment_of_a_term_without_records_counts_for_nothing() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk)
    assert seal(FOLDER, disk=disk) == ORIGIN
    Journal.begin(FOLDER, 2, disk=disk).append([passed(0)])
    assert contents(disk) == [passed(0)[0]]


# ---- torn or corrupt ------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([entry(0), passed(1)])
    late = reign(disk, 2)
    late.append([entry(1)])
    journal.append([passed(77)])  # behind its seal: it may rot as it likes
    reign(disk, 3).append([passed(2), entry(3), granted(4)])  # ends in zeros
    late.append([passed(78)])
    good = contents(disk)
    sealed = {position.term: position.offset for position, _ in read(FOLDER, disk=disk)}
    found = 0
    for term, name in enumerate((FIRST, SECOND, THIRD), start=1):
        data = disk.bytes_of(name)
        for bit in range(8 * len(data)):
            disk.put(name, flipped(data, bit))
            if bit < 8 * sealed[term]:
                with pytest.raises(Corrupt, match=name):
                    contents(disk)
                found += 1
            else:
                assert contents(disk) == good
        disk.put(name, data)
    assert contents(disk) == good and found > 4000


def test_every_flipped_bit_is_found_by_a_reader_that_starts_in_the_middle() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    start = journal.position
    journal.append([entry(1), granted(2)])
    data = disk.bytes_of(FIRST)
    for bit in range(8 * start.offset, 8 * len(data)):
        disk.put(FIRST, flipped(data, bit))
        with pytest.raises(Corrupt):
            contents(disk, start=start)


def test_a_file_cut_anywhere_is_torn_there_and_never_corrupt() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    ends = {HEAD_BYTES: 0}
    for batch in ([passed(0)], [entry(1), entry(2)], [entry(3)]):
        count = len(journal.append(batch)) + max(ends.values())
        ends[journal.position.offset] = count
    data, good = disk.bytes_of(FIRST), contents(disk)
    for size in range(HEAD_BYTES, len(data)):
        disk.put(FIRST, data[:size])
        end = max(end for end in ends if end <= size)
        assert contents(disk) == good[: ends[end]]
        assert tails(disk) == ([TornTail(FOLDER / FIRST, end, size - end)] if size > end else [])


def test_zeros_that_reach_the_end_are_torn_and_zeros_before_data_are_not() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    kept = journal.position.offset
    journal.append([entry(1), granted(2)])
    data = disk.bytes_of(FIRST)
    for hole in range(kept, len(data)):
        disk.put(FIRST, data[:hole].ljust(len(data) + 5000, b"\0"))
        assert contents(disk) == [passed(0)[0]]
        assert tails(disk) == [TornTail(FOLDER / FIRST, kept, len(data) + 5000 - kept)]
    disk.put(FIRST, data[:kept] + bytes(100) + data[kept + 100 :])
    with pytest.raises(Corrupt):
        contents(disk)


def test_damage_is_told_in_one_line_with_file_byte_and_record() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0), passed(1)])
    at = journal.position
    journal.append([passed(2)])
    disk.put(FIRST, flipped(disk.bytes_of(FIRST), 8 * at.offset + 8 * 30))
    with pytest.raises(Corrupt) as caught:
        contents(disk)
    assert f"{FIRST} is damaged at byte {at.offset}, record 3: its hash does not fit" in str(caught.value)
    assert "put back a copy" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(Corrupt, match=rf"byte {at.offset}, record 1 behind byte {at.offset}"):
        contents(disk, start=at)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", LONGEST_BYTES + 1) + bytes(16) + b"body",
        b"what another program wrote to the wrong file\n" * 100,
        random.Random(7).randbytes(10_000),
    ],
    ids=["a length", "text", "noise"],
)
def test_garbage_behind_the_last_record_is_cut_off_and_said(garbage: bytes) -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    whole = disk.bytes_of(FIRST)
    disk.put(FIRST, whole + garbage)
    assert contents(disk) == [passed(0)[0]]
    assert tails(disk) == [TornTail(FOLDER / FIRST, len(whole), len(garbage))]


def test_a_damaged_start_of_a_record_is_no_garbage() -> None:
    """Its record, or one behind it, is still there, and may have been acknowledged."""
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    at = journal.position.offset
    for number in (1, 2):
        journal.append([passed(number)])
        data = bytearray(disk.bytes_of(FIRST))
        data[at : at + 20] = b"\xff" * 20
        hurt = FaultyDisk()
        hurt.put(FIRST, bytes(data))
        with pytest.raises(Corrupt, match="record 2: a length of 4294967295 bytes cannot be"):
            contents(hurt)


def test_so_much_garbage_is_not_judged() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    disk.put(FIRST, disk.bytes_of(FIRST) + b"\xff" * (GARBAGE_BYTES + 1))
    with pytest.raises(Corrupt, match="record 2: a length of 4294967295 bytes cannot be"):
        contents(disk)


def test_a_record_of_another_version_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    with monkeypatch.context() as patch:
        patch.setattr(records, "encode", lambda record: b"\x92\xa9from-2030\x01")
        Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    with pytest.raises(Corrupt, match="record 1: this version of Atoll cannot read it"):
        contents(disk)


def test_a_sealed_segment_has_no_torn_end() -> None:
    disk = FaultyDisk()
    journal = Journal.begin(FOLDER, 1, disk=disk)
    journal.append([passed(0)])
    journal.append([entry(1)])
    reign(disk, 2)
    data = disk.bytes_of(FIRST)
    for size in range(len(data)):
        for changed in (data[:size], data[:size].ljust(len(data) + 10, b"\0")):
            if not changed.startswith(data):
                disk.put(FIRST, changed)
                with pytest.raises(Corrupt, match=FIRST):
                    contents(disk)


def test_a_missing_segment_is_missed() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    middle = reign(disk, 2).position
    reign(disk, 3)
    disk.remove(FOLDER / SECOND)
    for start in (None, middle):
        with pytest.raises(Corrupt, match=rf"{SECOND} is missing"):
            contents(disk, start=start)


def test_what_cannot_be_read_at_all_is_a_failed_disk() -> None:
    disk = FaultyDisk()
    (record,) = Journal.begin(FOLDER, 1, disk=disk).append([entry(0, b"abc")])
    disk.read_error = errno.EIO
    with pytest.raises(DiskFailed, match=rf"cannot read .*{FIRST}"):
        contents(disk)
    assert isinstance(record, MergedRecord) and record.payload is not None
    with pytest.raises(DiskFailed, match=r"cannot read .*payload-000001-0000\.bin"):
        payload(FOLDER, 1, record.payload, disk=disk)
