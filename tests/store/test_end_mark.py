"""The mark of a journal's durable end: a crash never makes it lie, and what was told is never gone in silence."""

from __future__ import annotations

import copy
import errno
from pathlib import Path

import pytest
from tests.store.entries import contents, entry, passed, reign
from tests.store.faulty import FOLDER, FaultyDisk, Left, PowerCut

from atoll.protocol.records import TermRecord
from atoll.store.disk import DiskFailed, LocalDisk, NoRoom
from atoll.store.durable_end import EndLost, check_end, find_end
from atoll.store.end_mark import SLOT_BYTES, DurableEnd, place_mark, read_mark
from atoll.store.journal import Journal, JournalEntry, seal
from atoll.store.rundir import RunDir
from atoll.store.segments import HEAD_BYTES, Position

OUT = RunDir(Path())
"""Its journal/ is the folder that the other tests of the store write to."""
FIRST = "segment-000001.log"
MARK = "../durable/000001"


def begin(disk: FaultyDisk, term: int = 1) -> Journal:
    return Journal.begin(FOLDER, term, disk=disk, marks=OUT.marks)


def marked(disk: FaultyDisk) -> Position | None:
    mark = read_mark(OUT.marks, disk)
    return mark.position if mark is not None else None


def mark_bytes(disk: FaultyDisk) -> bytes:
    return disk.read(OUT.marks / "000001", 0, 2 * SLOT_BYTES)


# ---- crashes ---------------------------------------------------------------------------------------------------------


ONE, TWO = [passed(2)], [entry(2, b"payload"), passed(3)]
SAMPLE = [(ONE, 0, "forgotten"), (TWO, 1, "kept"), (ONE, 2, "grown")]
LEFT: tuple[Left, ...] = ("forgotten", "kept", "grown")
CRASHES = [(batch, before, left) for batch in (ONE, TWO) for before in (0, 1, 2) for left in LEFT]


@pytest.mark.parametrize(
    ("batch", "before", "left"),
    [pytest.param(*one, marks=() if one in SAMPLE else pytest.mark.faults) for one in CRASHES],
)
def test_the_power_is_cut_at_every_byte_of_an_append_and_its_mark(
    batch: list[JournalEntry], before: int, left: Left
) -> None:
    """Nothing that returned is lost, and nothing is taken for lost: also not with a torn mark, or one that the disk
    forgot, or between an append and its mark."""
    disk = FaultyDisk()
    journal = begin(disk)
    for number in range(before):
        journal.append([passed(number)])
    whole, writer = copy.deepcopy((disk, journal))
    whole.until_power_cut = most = 2**20
    writer.append(batch)
    states = set()
    for size in range(most - whole.until_power_cut + 2):
        cut, writer = copy.deepcopy((disk, journal))
        cut.until_power_cut = size
        told = before
        try:
            writer.append(batch)
            told = before + len(batch)
        except PowerCut:
            pass
        cut.crash(left)
        mark = check_end(OUT, cut)
        found = contents(cut)
        assert len(found) >= told and len(found) in (before, before + len(batch))
        states.add((len(found), mark is not None and mark.position == seal(FOLDER, disk=cut)))
        later = begin(cut, 2)
        if later._after.term:
            later.append([(TermRecord(2, later._after.offset, later._after.hash, 0), None)])
        later.append([passed(9)])
        assert marked(cut) == later.position, "and the next term goes on"
    assert (before, before > 0) in states, "cut before the append was whole"
    assert (before + len(batch), True) in states, "and after its mark"
    assert (before + len(batch), False) in states, "and between the two"


def test_what_is_told_is_marked_before_and_what_is_marked_was_synced_before() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    journal.append([passed(0)])
    disk.calls.clear()
    journal.append([entry(1, b"payload")])
    names = [name for kind, name in disk.calls if kind == "sync" and name != "journal"]
    assert names == ["payload-000001-0000.bin", FIRST], "it waits for no sync of the mark"
    assert disk.calls[-1] == ("write", "000001") and marked(disk) == journal.position
    journal.settle_mark()
    assert disk.calls[-1] == ("sync", "000001")
    journal.settle_mark()
    journal.append([passed(2)])
    journal.append([passed(3)])
    assert disk.calls[-2:] == [("sync", "000001"), ("write", "000001")], "two marks are never torn at once"


def test_what_is_not_synced_is_not_marked() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    journal.append([passed(0)])
    at = journal.position
    journal.append([passed(1)], sync=False)
    journal.append([passed(2)], sync=False)
    assert marked(disk) == at
    lost = copy.deepcopy(disk)
    lost.crash("forgotten")
    assert check_end(OUT, lost) is not None and len(contents(lost)) == 1, "a power cut may take them"
    journal.sync()
    assert marked(disk) == journal.position


def test_a_torn_mark_leaves_the_one_before_it() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    places = []
    for number in range(4):
        journal.append([passed(number)])
        places.append(journal.position)
    newest = [marked(disk)]
    for slot in (0, 1):
        torn = copy.deepcopy(disk)
        data = bytearray(mark_bytes(torn))
        data[slot * SLOT_BYTES + 20] ^= 1
        torn.put(MARK, b"")
        torn._files[OUT.marks / "000001"].data = data
        newest.append(marked(torn))
    assert newest == [places[3], places[3], places[2]]


@pytest.mark.parametrize("first", [True, False])
def test_a_mark_waits_for_room_and_the_append_with_it(first: bool) -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    if not first:
        journal.append([passed(0)])
    size, before = len(disk.bytes_of(FIRST)), marked(disk)
    frame = len(contents(disk))
    whole, writer = copy.deepcopy((disk, journal))
    whole.room_bytes = 2**20
    writer.append([passed(1)])
    disk.room_bytes = 2**20 - whole.room_bytes - 1
    with pytest.raises(NoRoom):
        journal.append([passed(1)])
    assert (len(disk.bytes_of(FIRST)), marked(disk)) == (size, before)
    disk.room_bytes = None
    journal.append([passed(1)])
    assert marked(disk) == journal.position and len(contents(disk)) == frame + 1


def test_a_mark_that_cannot_be_made_durable_ends_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    journal.append([passed(0)])
    assert journal._mark is not None and journal._mark._file is not None

    def fail() -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(journal._mark._file, "datasync", fail)
    journal.append([passed(1)])
    with pytest.raises(DiskFailed, match="durable/000001"):
        journal.settle_mark()
    with pytest.raises(DiskFailed):
        journal.append([passed(2)])


# ---- writers that were replaced --------------------------------------------------------------------------------------


def test_a_replaced_writer_changes_no_mark_but_its_own() -> None:
    disk = FaultyDisk()
    replaced = begin(disk)
    replaced.append([passed(0)])
    end = seal(FOLDER, disk=disk)
    later = Journal.begin(FOLDER, 2, after=end, disk=disk, marks=OUT.marks)
    replaced.append([passed(1)])
    assert check_end(OUT, disk) is not None, "the successor has written nothing yet"
    later.append([(TermRecord(2, end.offset, end.hash, 1), None)])
    replaced.append([passed(2)])
    assert marked(disk) == later.position and check_end(OUT, disk) is not None


def test_a_mark_behind_a_seal_was_told_to_nobody() -> None:
    """The successor died between its first append and its first mark."""
    disk = FaultyDisk()
    replaced = begin(disk)
    replaced.append([passed(0)])
    end = seal(FOLDER, disk=disk)
    replaced.append([passed(1)])
    later = Journal.begin(FOLDER, 2, after=end, disk=disk)
    later.append([(TermRecord(2, end.offset, end.hash, 1), None)])
    assert marked(disk) == replaced.position
    assert check_end(OUT, disk) is not None
    assert find_end(OUT, disk) == DurableEnd(later.position, 1)


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_a_journal_that_was_cut_anywhere_before_its_end_is_refused() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    for number in range(3):
        journal.append([passed(number), entry(number + 10, b"payload")])
    data = disk.bytes_of(FIRST)
    for size in range(len(data)):
        for less in (data[:size], data[:size].ljust(len(data), b"\0")):
            if less == data or (size < HEAD_BYTES and size > 0):
                continue  # a damaged head is Corrupt in every way
            hurt = copy.deepcopy(disk)
            hurt.put(FIRST, less)
            with pytest.raises(EndLost, match=r"but round 12 was durable|ends before what was durable"):
                check_end(OUT, hurt)


def test_a_deleted_segment_is_refused() -> None:
    disk = FaultyDisk()
    begin(disk).append([passed(0)])
    end = seal(FOLDER, disk=disk)
    later = Journal.begin(FOLDER, 2, after=end, disk=disk, marks=OUT.marks)
    later.append([(TermRecord(2, end.offset, end.hash, 1), None)])
    later.append([passed(7)])
    disk.remove(FOLDER / "segment-000002.log")
    with pytest.raises(EndLost, match=r"ends at round 0, but round 7 was durable: journal/segment-000002.log is gone"):
        check_end(OUT, disk)


def test_another_journal_in_the_place_of_the_own_is_refused() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    journal.append([passed(0)])
    other, writer = copy.deepcopy((disk, journal))
    journal.append([passed(1)])
    writer.append([passed(2)])
    writer.append([passed(3)])
    disk.put(FIRST, other.bytes_of(FIRST))
    with pytest.raises(EndLost, match="holds something else"):
        check_end(OUT, disk)


def test_a_mark_that_is_damaged_in_both_slots_is_no_mark_that_is_missing() -> None:
    disk = FaultyDisk()
    journal = begin(disk)
    for number in range(2):
        journal.append([passed(number)])
    disk._files[OUT.marks / "000001"].data = bytearray(b"\1" * 2 * SLOT_BYTES)
    with pytest.raises(EndLost, match="is damaged, and nothing else says"):
        check_end(OUT, disk)


def test_a_run_of_an_earlier_version_has_no_mark_and_gets_one() -> None:
    disk = FaultyDisk()
    Journal.begin(FOLDER, 1, disk=disk).append([passed(0)])
    assert check_end(OUT, disk) is None
    end = seal(FOLDER, disk=disk)
    later = Journal.begin(FOLDER, 2, after=end, disk=disk, marks=OUT.marks)
    assert check_end(OUT, disk) is None
    later.append([(TermRecord(2, end.offset, end.hash, 1), None)])
    assert marked(disk) == later.position


def test_a_mark_is_set_back_and_the_next_term_goes_on_from_there(tmp_path: Path) -> None:
    out = RunDir(tmp_path)
    out.journal.mkdir()
    Journal.begin(out.journal, 1, disk=LocalDisk(), marks=out.marks).append([passed(0)])
    end = find_end(out, LocalDisk())
    later = reign(LocalDisk(), 2, out.journal)
    place_mark(out.marks, DurableEnd(later.position, 1))
    place_mark(out.marks, end)
    assert read_mark(out.marks, LocalDisk()) == end and [path.name for path in out.marks.iterdir()] == ["000001"]
