"""The journal's way into the bucket: whole appends, payloads before the records that name them.

What may be uploaded is known by marks, which the journal's writer gives after every append: bytes behind a mark may
still be cut back (store/journal.py). Files of earlier terms do not change any more; of their segments only what the
next term's head says (the seal) is uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.bucket.client import Bucket, TakenKey
from atoll.bucket.layout import (
    JOURNAL,
    CopyPiece,
    Listing,
    covered,
    cut_pieces,
    join_pieces,
    local_name,
    needless_pieces,
    payload_name,
    payload_place,
    segment_name,
)
from atoll.protocol.errors import AtollError
from atoll.store.disk import LocalDisk
from atoll.store.segments import Position, follows

_PAYLOAD_FILE = re.compile(r"(payload-\d{6,}-\d{4,})\.bin")


@dataclass(frozen=True, slots=True)
class JournalMark:
    """Where the journal stood after an append."""

    term: int
    segment_bytes: int
    file: int
    """The current payload file …"""
    payload_bytes: int
    """… and its size."""
    rounds: int
    """Committed by then."""
    at: float
    """When it was appended, on the monotonic clock."""


class MissingPayloads(AtollError):
    """Payloads were deleted, as a cut made them needless, before they were uploaded. The journal in the bucket must not
    go past them before it has a cut behind them."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the journal waits until the newest cut is in the bucket: {name} was needless here before it was copied"
        )


class JournalCopy:
    """Belongs to one thread, but for `join_small_pieces`. Sets of the listing are copied before they are looked at: the
    thread that deletes changes them too."""

    def __init__(self, bucket: Bucket, folder: Path, listing: Listing, mark: JournalMark) -> None:
        self._bucket, self._folder, self._listing = bucket, folder, listing
        self._sealed = list_sealed(folder, mark.term)
        self._done: set[str] = set()
        """Payload files that do not grow any more and were put, or are not needed."""

    def put_through(
        self, mark: JournalMark, written: Mapping[str, int], has_cut_behind: Callable[[tuple[int, int]], bool]
    ) -> None:
        """Upload everything up to this mark. `written`: payload files of this term that were written to, with sizes at
        or past the mark; `has_cut_behind`: whether the bucket has a cut that needs no payload file up to this (term,
        number)."""
        for name, size in sorted({**self._sealed, **self._list_payloads(mark), **written}.items()):
            if (place := payload_place(name)) is None or name in self._done:
                continue
            try:
                self._put_file(name, size)
            except FileNotFoundError:
                if not has_cut_behind(place):
                    raise MissingPayloads(name) from None
            if place < (mark.term, mark.file):
                self._done.add(name)
        for name, size in sorted(self._sealed.items()):
            if payload_place(name) is None:
                self._put_file(name, size)
        self._put_file(segment_name(mark.term), mark.segment_bytes)
        self._sealed.clear()

    def _list_payloads(self, mark: JournalMark) -> dict[str, int]:
        """Of this term. Those before the current one have their last size."""
        found: dict[str, int] = {}
        for path in self._folder.glob(f"payload-{mark.term:06d}-*.bin"):
            place = payload_place(path.stem)
            if place is not None and place[1] < mark.file:
                try:
                    found[path.stem] = path.stat().st_size
                except FileNotFoundError:
                    continue
        if mark.payload_bytes:
            found[payload_name(mark.term, mark.file)] = mark.payload_bytes
        return found

    def _put_file(self, name: str, size: int) -> None:
        """Its bytes that are not in the bucket."""
        known = self._listing.journal.setdefault(name, set())
        for piece in cut_pieces(covered(tuple(known)), size):
            self._put_piece(name, piece)

    def _put_piece(self, name: str, piece: CopyPiece) -> None:
        with (self._folder / local_name(name)).open("rb") as file:
            file.seek(piece.begin)
            data = file.read(piece.end - piece.begin)
        assert len(data) == piece.end - piece.begin, f"{name} is shorter than its mark"
        # Taken: our own put, whose answer was lost. One term has one writer, and what it appended does not change.
        with suppress(TakenKey):
            self._bucket.create(piece.key(f"{JOURNAL}/{name}"), data)
        self._listing.journal[name].add(piece)

    def join_small_pieces(self, check: Callable[[], None]) -> None:
        """Put many small pieces of a segment together. `check` raises where this syncer is deposed."""
        for name in [name for name in tuple(self._listing.journal) if payload_place(name) is None]:
            pieces = self._listing.journal[name]
            joined = join_pieces(tuple(pieces))
            if joined is None or not (self._folder / local_name(name)).exists():
                continue
            self._put_piece(name, joined)
            check()
            needless = needless_pieces(tuple(pieces))
            self._bucket.delete([piece.key(f"{JOURNAL}/{name}") for piece in needless])
            pieces.difference_update(needless)


def list_sealed(folder: Path, term: int) -> dict[str, int]:
    """The files of earlier terms in journal/ that the segment of this term builds on, with their final sizes."""
    sizes: dict[str, int] = {}
    at = Position(term, 0, "")
    while (folder / f"{segment_name(at.term)}.log").exists():
        at = follows(folder, at.term, LocalDisk())
        if not at.term:
            break
        sizes[segment_name(at.term)] = at.offset
    terms = {int(name.rpartition("-")[2]) for name in sizes}
    for path in folder.iterdir():
        found = _PAYLOAD_FILE.fullmatch(path.name)
        place = payload_place(found[1]) if found else None
        if place is not None and place[0] in terms:
            sizes[path.stem] = path.stat().st_size
    return sizes
