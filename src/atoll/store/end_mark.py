"""The mark of a journal's durable end: a small file apart from the segments, overwritten with every append.

    durable/000003    the mark of term 3: two slots of one sector, 4 KiB apart, overwritten in turns
    slot              magic, u32 term, u64 offset, 16 bytes hash, u64 rounds, blake2b of all that      little-endian

- An append is written and synced, then its mark is written, and only then may anything be told. So a mark never says
  more than what is durable; an append that was not synced (durability = "cut") is not marked.
- The mark is synced behind the telling (`settle`), at the latest before the next one is written: a round does not wait
  for that sync, and a power cut leaves the mark one append behind at most. That is no loss, for the journal goes on.
- A torn write costs one slot: the other holds the mark before it. The file has its full size from the start, so that
  to overwrite a slot changes nothing of the file but these bytes.
- Each term has a mark of its own, as it has a segment: a writer that was replaced changes nobody else's. The newest
  term's counts, and the older ones go once it is durable.

`durable_end.py` holds the journal against it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.records import AnyRecord, MergedRecord, PassedRecord, RestoredRecord, TermRecord
from atoll.store.atomic import make_folder, write_atomic
from atoll.store.disk import (
    Corrupt,
    Disk,
    DiskFailed,
    InPlaceFile,
    NoRoom,
    delete,
    failed,
    make_durable,
    not_written,
    reading,
)
from atoll.store.segments import Position

SLOT_BYTES = 4096
"""A torn write of a disk with sectors of 4 KiB stays within one slot."""
_MAGIC = b"atoll mark 1\n"
_SLOT = struct.Struct("<13sIQ16sQ")
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """Up to where a journal was durable."""

    position: Position
    rounds: int
    """Rounds closed up to there; 0: none in this term."""


class BadMark(Corrupt):
    """Both slots of a mark are damaged."""


class EndMark:
    """The mark of one term, for one writer. The file is made with the first append that is durable."""

    def __init__(self, folder: Path, term: int, disk: Disk) -> None:
        self._folder, self._path, self._disk = folder, _mark_path(folder, term), disk
        self._term = term
        self._file: InPlaceFile | None = None
        self._slot = 0
        self._newest: DurableEnd | None = None
        self._settled = True
        """The newest mark is durable."""

    def write(self, end: DurableEnd) -> None:
        """Every reader finds it once this returns; a power cut may leave the one before it. NoRoom: that one counts,
        and the same may be tried again."""
        if end == self._newest:
            return
        self.settle()  # two slots that are not durable could both be torn
        if self._file is None:
            self._file = self._create_file(end)
        else:
            self._settled = False
            self._overwrite(self._file, self._slot, end)
        self._slot, self._newest = 1 - self._slot, end

    def settle(self) -> None:
        """The newest mark is durable once this returns."""
        if self._file is not None and not self._settled:
            self._sync(self._file)
            self._settled = True

    def _create_file(self, end: DurableEnd) -> InPlaceFile:
        try:
            file = self._disk.create_in_place(self._path, 2 * SLOT_BYTES)
        except OSError as error:
            raise not_written(error, self._path) from error
        try:
            self._overwrite(file, 0, end)
            self._sync(file)
            for folder in (self._folder, self._folder.parent):
                make_durable(folder, self._disk)
        except (NoRoom, DiskFailed):
            # Out of the way of a new try.
            file.close()
            with suppress(OSError):
                self._disk.remove(self._path)
            raise
        for term in _list_terms(self._folder, self._disk):
            if term < self._term:
                delete(_mark_path(self._folder, term), self._disk)
        return file

    def _overwrite(self, file: InPlaceFile, slot: int, end: DurableEnd) -> None:
        try:
            file.write_at(slot * SLOT_BYTES, _encode(end))
        except OSError as error:
            raise not_written(error, self._path) from error

    def _sync(self, file: InPlaceFile) -> None:
        try:
            file.datasync()
        except OSError as error:
            raise failed(error, "make durable", self._path) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def place_mark(folder: Path, end: DurableEnd) -> None:
    """Mark the end of a journal that has no writer, in place of all its earlier marks."""
    make_folder(folder)
    path = _mark_path(folder, end.position.term)
    write_atomic(path, _encode(end).ljust(2 * SLOT_BYTES, b"\0"))
    for other in folder.iterdir():
        if other.name.isdecimal() and other != path:
            other.unlink()


def read_mark(folder: Path, disk: Disk) -> DurableEnd | None:
    """The newest mark; None: there is none. BadMark: it is damaged."""
    for term in sorted(_list_terms(folder, disk), reverse=True):
        path = _mark_path(folder, term)
        try:
            data = disk.read(path, 0, 2 * SLOT_BYTES)
        except FileNotFoundError:
            continue  # a newer term has taken its place since the folder was listed
        except OSError as error:
            raise failed(error, "read", path) from error
        slots = [data[:SLOT_BYTES], data[SLOT_BYTES:]]
        ends = [end for slot in slots if (end := _decode(slot)) is not None and end.position.term == term]
        if ends:
            return max(ends, key=lambda end: end.position.offset)
        # The first mark of a term is torn where its writer died, and then the second slot was never written.
        if all(slot.strip(b"\0") for slot in slots):
            raise BadMark(f"{path} is damaged, and nothing else says up to where the journal was durable")
    return None


def rounds_behind(records: Iterable[AnyRecord], before: int = 0) -> int:
    """Rounds that are closed behind these records, as far as they tell."""
    for record in records:
        match record:
            case MergedRecord(round=number) | PassedRecord(round=number):
                before = max(before, number + 1)
            case TermRecord(round=closed) | RestoredRecord(at=closed):
                before = max(before, closed)
            case _:
                pass
    return before


def _mark_path(folder: Path, term: int) -> Path:
    return folder / f"{term:06d}"


def _list_terms(folder: Path, disk: Disk) -> list[int]:
    with reading(folder):
        try:
            return [int(name) for name in disk.names(folder) if name.isdecimal()]
        except FileNotFoundError:
            return []


def _encode(end: DurableEnd) -> bytes:
    at = end.position
    body = _SLOT.pack(_MAGIC, at.term, at.offset, bytes.fromhex(at.hash), end.rounds)
    return body + _check(body)


def _decode(slot: bytes) -> DurableEnd | None:
    body, check = slot[: _SLOT.size], slot[_SLOT.size : _SLOT.size + _CHECK_BYTES]
    if not body.startswith(_MAGIC) or check != _check(body):
        return None
    _, term, offset, chain, rounds = _SLOT.unpack(body)
    return DurableEnd(Position(term, offset, chain.hex()), rounds)


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
