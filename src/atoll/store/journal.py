"""The journal of a run: what its syncer decided, durable before anybody is told.

    segment-000001.log        the records of term 1, kept for ever (segments.py)
    payload-000001-0000.bin   merged outer gradients of term 1, and what the run was rolled back to; a new file after
                              every cut, the old ones are deleted
    ../durable/000001         the mark of term 1: up to where its segment was durable (end_mark.py)

Rules:
- an append is durable when it returns, and all of it counts or nothing. Payloads come first, so that a record that is
  read back always finds its own; all frames go out in one write, and its mark is written last;
- a full disk (NoRoom) changes nothing: both files are cut back to where they were, and the same may be tried again;
- after any other failure, a failed datasync above all, the journal is dead: what is on the disk is not known any more,
  and the next syncer finds out by reading it;
- every term writes files of its own, and none of a predecessor's is ever changed. The head of a segment says where the
  one before counts up to (its seal), so that a reader knows the way before it has read a record; TermRecord, the first
  record, says the same inside the chain. What a replaced syncer wrote behind its seal is ignored, and so is a whole
  segment that nobody follows because its writer came too late;
- the chain of hashes is checked while reading. What was acknowledged is never dropped in silence: segments.py says what
  is torn and what is Corrupt.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

from msgspec import structs

from atoll.digests import compute_digest
from atoll.protocol import records
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import AnyRecord, BegunRecord, MergedRecord, PayloadPlace, RestoredRecord, TermRecord
from atoll.store.atomic import write_atomic
from atoll.store.disk import (
    Corrupt,
    Disk,
    DiskFailed,
    GrowingFile,
    LocalDisk,
    NoRoom,
    delete,
    failed,
    make_durable,
    reading,
)
from atoll.store.end_mark import DurableEnd, EndMark, rounds_behind
from atoll.store.segments import (
    HEAD_BYTES,
    ORIGIN,
    Position,
    Segment,
    TornTail,
    check_format,
    damaged,
    encode_append,
    encode_head,
    follows,
    is_begun,
    segment_path,
)

__all__ = ["ORIGIN", "Journal", "Position", "TornTail", "payload", "read", "seal"]

JournalEntry = tuple[AnyRecord, memoryview | None]
OnTail = Callable[[TornTail], None]

_SEGMENT = re.compile(r"segment-(\d{6,})\.log")
_PAYLOAD = re.compile(r"payload-(\d{6,})-(\d{4,})\.bin")


class Journal:
    """The segment of one term, open for writing by one thread at a time."""

    def __init__(self, folder: Path, term: int, after: Position, disk: Disk, mark: EndMark | None) -> None:
        """Use `begin`."""
        self.position = Position(term, HEAD_BYTES, after.hash)
        """Behind the last append."""
        self.file = 0
        """The number of the current payload file. The file is made with its first payload."""
        self._folder, self._after, self._disk, self._mark = folder, after, disk, mark
        self._rounds = 0
        """Closed, as far as records of this term tell."""
        self._segment = GrowingFile(segment_path(folder, term), disk)
        self._payloads: GrowingFile | None = None
        self._rotated: list[GrowingFile] = []
        """Earlier payload files that are not durable as a whole yet."""
        self._failure = ""

    @classmethod
    def begin(
        cls, folder: Path, term: int, *, after: Position | None = None, disk: Disk, marks: Path | None = None
    ) -> Journal:
        """The segment of a new term.

        `after` is where the journal ended when it was read after the term was claimed; None: read it now, all of it.
        `marks`: the folder that its durable end is marked in; None: it is not, in a journal that belongs to no run.
        """
        after = seal(folder, disk=disk) if after is None else after
        assert after.term < term, f"term {term} cannot follow term {after.term}"
        if after.term:
            # Its writer may have been stopped between a write and its datasync, or have waited for cuts only: what we
            # build on has to be durable. Payloads first: a record that survives a power cut must find its own.
            _make_payloads_durable(folder, after.term, disk)
            make_durable(segment_path(folder, after.term), disk)
        journal = cls(folder, term, after, disk, EndMark(marks, term, disk) if marks is not None else None)
        try:
            journal._segment.write(encode_head(term, after))
            journal._segment.datasync()
            make_durable(folder, disk)
        except (NoRoom, DiskFailed):
            # Out of the way of a new try; a segment without records counts for nothing anyway.
            journal.close()
            with suppress(OSError):
                disk.remove(journal._segment.path)
            raise
        journal._segment.mark_kept()
        return journal

    def append(self, entries: Sequence[JournalEntry], *, sync: bool = True) -> tuple[AnyRecord, ...]:
        """Durable once it returns, unless `sync` is off; the records as written, with the places of their payloads."""
        if not entries:
            return ()
        self._check_first(entries[0][0])
        with self._whole_or_dead():
            written = tuple(record if data is None else self._write_payload(record, data) for record, data in entries)
            if sync:
                self._sync_payloads()
            frames, behind = encode_append(self.position, map(records.encode, written))
            rounds = rounds_behind(written, self._rounds)
            self._segment.write(frames)
            if sync:
                self._segment.datasync()
                self._mark_end(behind, rounds)
        self._rounds = rounds
        for file in self._list_files():
            file.mark_kept()
        self.position = behind
        return written

    def sync(self) -> None:
        """All that was appended is durable once this returns."""
        with self._whole_or_dead():
            self._sync_payloads()
            self._segment.datasync()
            self._mark_end(self.position, self._rounds)

    def settle_mark(self) -> None:
        """The mark of the last append is durable once this returns; the append itself is since it returned."""
        if self._mark is not None:
            with self._whole_or_dead():
                self._mark.settle()

    def _mark_end(self, position: Position, rounds: int) -> None:
        if self._mark is not None and position.offset > HEAD_BYTES:
            self._mark.write(DurableEnd(position, rounds))

    @property
    def payload_bytes(self) -> int:
        """Of the current payload file."""
        return 0 if self._payloads is None else self._payloads.size

    def rotate(self) -> int:
        """Start the next payload file; its number. Nothing is written: it is called on an event loop."""
        with self._whole_or_dead():
            if self._payloads is not None:
                self._rotated.append(self._payloads)
            self._payloads = None
            self.file += 1
        return self.file

    def _sync_payloads(self) -> None:
        """Records that become durable find their payloads, those in earlier files too."""
        while self._rotated:
            self._rotated[0].datasync()
            self._rotated.pop(0).close()
        if self._payloads is not None:
            self._payloads.datasync()

    def trim(self, term: int, file: int) -> None:
        """Delete the payload files of earlier terms, and those of `term` below `file`, which a cut made needless."""
        assert (term, file) <= (self.position.term, self.file), "this would delete what is being written"
        with self._whole_or_dead():
            matches = map(_PAYLOAD.fullmatch, _names(self._folder, self._disk))
            numbers = [(int(match[1]), int(match[2])) for match in matches if match]
            for old in sorted(number for number in numbers if number < (term, file)):
                delete(payload_path(self._folder, *old), self._disk)

    def close(self) -> None:
        if not self._failure:
            with suppress(DiskFailed):  # then the mark before it counts
                self.settle_mark()
        self._failure = self._failure or f"{self._segment.path} is closed"
        for file in self._list_files():
            file.close()
        if self._mark is not None:
            self._mark.close()

    @contextmanager
    def _whole_or_dead(self) -> Iterator[None]:
        """What is done in here succeeds, or changes nothing for lack of room, or was the last thing the journal did."""
        if self._failure:
            raise DiskFailed(self._failure)
        # Until it is known how this ends: an exception from elsewhere (Ctrl-C) may leave half of it on the disk.
        self._failure = f"a write to {self._segment.path} was interrupted: start the syncer again"
        try:
            try:
                yield
            except NoRoom:
                for file in self._list_files():
                    file.cut_back()
                self._failure = ""
                raise
        except DiskFailed as error:
            self._failure = str(error)
            raise
        self._failure = ""

    def _check_first(self, record: AnyRecord) -> None:
        if self._after.term and self.position.offset == HEAD_BYTES:
            due = (self.position.term, self._after.offset, self._after.hash)
            assert isinstance(record, TermRecord), "the first record of a later term is TermRecord"
            assert (record.term, record.before_bytes, record.before_hash) == due, f"TermRecord has to name {due}"

    def _write_payload(self, record: AnyRecord, data: memoryview) -> AnyRecord:
        assert isinstance(record, MergedRecord | RestoredRecord), f"{type(record).__name__} has no payload"
        if self._payloads is None:
            self._payloads = GrowingFile(payload_path(self._folder, self.position.term, self.file), self._disk)
            make_durable(self._folder, self._disk)
        raw = data.cast("B")
        place = PayloadPlace(self.file, self._payloads.size, raw.nbytes, compute_digest(raw))
        self._payloads.write(raw)
        return structs.replace(record, payload=place)

    def _list_files(self) -> list[GrowingFile]:
        return [self._segment, *self._rotated, *([] if self._payloads is None else [self._payloads])]


# ---- reading ----------------------------------------------------------------------------------------------------


def read(
    folder: Path, *, start: Position | None = None, disk: Disk, on_tail: OnTail = lambda tail: None
) -> Iterator[tuple[Position, AnyRecord]]:
    """All records behind `start` in order, each with the position behind it. Nothing before `start` is read."""
    at = start or ORIGIN
    way = _way(folder, at, disk, on_tail)
    seals = [before for _, before in way[1:]]
    for (term, before), sealed in zip_longest(way, seals):
        if term != at.term:
            at = Position(term, HEAD_BYTES, at.hash)
        segment = Segment(folder, at, sealed, disk)
        while batch := segment.next_append():
            if before is not None and at.offset == HEAD_BYTES:
                _check_reigned(segment.path, term, before, batch[0][1])
            at = segment.at
            yield from batch
        if (tail := segment.tail()) is not None:
            on_tail(tail)


def seal(folder: Path, *, start: Position | None = None, disk: Disk) -> Position:
    """Where the journal validly ends. Nothing is changed: a successor names this position, and readers honour it."""
    end = start or ORIGIN
    for position, _ in read(folder, start=start, disk=disk):
        end = position
    return end


def payload(folder: Path, term: int, place: PayloadPlace, *, disk: Disk) -> bytes:
    """The payload of a record of that term, checked."""
    path = payload_path(folder, term, place.file)
    with reading(path):
        try:
            data = disk.read(path, place.offset, place.length)
        except FileNotFoundError as error:
            raise _missing(path, "a record names it") from error
    if len(data) < place.length:
        raise damaged(path, place.offset, f"it holds {len(data)} of the {place.length} bytes of a payload")
    if compute_digest(data) != place.digest:
        raise damaged(path, place.offset, f"a payload of {place.length} bytes has another digest")
    return data


def describe_lack(folder: Path, term: int, place: PayloadPlace) -> str:
    """Say that a payload is not here whole; empty: it is."""
    path = payload_path(folder, term, place.file)
    if not path.exists():
        return f"{path} is gone"
    size = path.stat().st_size
    return "" if size >= place.offset + place.length else f"{path} ends at byte {size:,}"


def payload_path(folder: Path, term: int, file: int) -> Path:
    return folder / f"payload-{term:06d}-{file:04d}.bin"


def _make_payloads_durable(folder: Path, term: int, disk: Disk) -> None:
    for match in filter(None, map(_PAYLOAD.fullmatch, _names(folder, disk))):
        if int(match[1]) == term:
            try:
                disk.sync(folder / match[0])
            except FileNotFoundError:
                continue  # a writer that was replaced has deleted it, since a cut made it needless
            except OSError as error:
                raise failed(error, "make durable", folder / match[0]) from error


_Step = tuple[int, Position | None]
"""A segment, and what it follows; None where that does not matter."""


def _way(folder: Path, start: Position, disk: Disk, on_tail: OnTail) -> list[_Step]:
    """The segments that count from `start` on, found from the newest back.

    The newest is right: its writer claimed its term before it read what lay there, so whatever was acknowledged in an
    earlier term was in what it read.
    """
    matches = map(_SEGMENT.fullmatch, _names(folder, disk))
    terms = sorted(term for match in matches if match and (term := int(match[1])) >= start.term)
    while terms and terms[-1] > start.term and not _holds_records(folder, terms[-1], disk, on_tail):
        terms.pop()
    way: list[_Step] = []
    term = terms[-1] if terms else 0
    while term > start.term:
        before = follows(folder, term, disk)
        way.insert(0, (term, before))
        if before.term > start.term and before.term not in terms:
            raise _missing(segment_path(folder, before.term), f"term {term} follows it")
        term = before.term
    if start.term and start.term not in terms:
        raise _missing(segment_path(folder, start.term), f"byte {start.offset} of it was to be the start")
    if term != start.term:
        raise damaged(
            segment_path(folder, way[0][0]), 0, f"it follows term {term} and not the start, term {start.term}"
        )
    if term:
        check_format(folder, term, disk)
    return [(term, None), *way] if term else way


def _holds_records(folder: Path, term: int, disk: Disk, on_tail: OnTail) -> bool:
    """Whether a newest segment counts: its writer may have died before its first append was whole."""
    if not is_begun(folder, term, disk):
        return False
    segment = Segment(folder, Position(term, HEAD_BYTES, follows(folder, term, disk).hash), None, disk)
    if segment.next_append():
        return True
    if (tail := segment.tail()) is not None:
        on_tail(tail)
    return False


def _check_reigned(path: Path, term: int, before: Position, record: AnyRecord) -> None:
    """The first record of a later segment says what its head says."""
    found = (record.term, record.before_bytes, record.before_hash) if isinstance(record, TermRecord) else None
    if before.term and found != (term, before.offset, before.hash):
        raise damaged(path, HEAD_BYTES, "record 1: it does not follow what the head of the file follows")


def _names(folder: Path, disk: Disk) -> list[str]:
    with reading(folder):
        return disk.names(folder)


def _missing(path: Path, fact: str) -> Corrupt:
    return Corrupt(f"{path} is missing, and {fact}: put back a copy of it, or go on from a cut as a new run")


def write_tape(path: Path, lines: Sequence[AnyRecord]) -> None:
    """Write records that no run made, in the form of a first journal segment; the file is whole or not there."""
    data = [encode_head(1, ORIGIN)]
    at = Position(1, HEAD_BYTES, ORIGIN.hash)
    for line in lines:
        piece, at = encode_append(at, [records.encode(line)])
        data.append(piece)
    try:
        write_atomic(path, b"".join(data))
    except OSError as error:
        raise ConfigError(f"cannot write the tape to {path}: {error.strerror or error}") from error


def read_tape(path: Path) -> list[AnyRecord]:
    """ConfigError names what is wrong with it."""
    if not path.is_file():
        raise ConfigError(f"there is no tape {path}: make one with atoll simulate tape")
    with tempfile.TemporaryDirectory(prefix="atoll-tape-") as folder:
        segment = segment_path(Path(folder), 1)
        os.symlink(path.absolute(), segment)
        tails: list[int] = []
        try:
            lines = [
                line
                for _, line in read(Path(folder), disk=LocalDisk(), on_tail=lambda tail: tails.append(tail.size_bytes))
            ]
        except (Corrupt, DiskFailed) as error:
            raise ConfigError(str(error).replace(str(segment), str(path)).partition(": put back")[0]) from error
    if tails or not lines or not isinstance(lines[0], BegunRecord):
        raise ConfigError(f"{path} is not a whole tape: make it again with atoll simulate tape")
    return lines
