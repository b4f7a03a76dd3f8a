"""One segment of the journal: how records lie in it, and how they are read back.

    segment    = head, frame, frame, …
    head       = magic, u32 term, the position it follows (u32 term, u64 offset, 16 bytes hash), blake2b of all that
    frame      = u32 length, 16 bytes hash, body, closing byte          all little-endian
    hash       = blake2b(hash before it + body); before the first record of a run: zeros. 16 bytes

All records of one append count or none: the closing byte of its last frame is LAST, of those before it MORE. Neither is
zero, and no single flipped bit turns one into the other or into zero. So the end of a segment can be judged:

    torn       an append that is incomplete, or that ends in zeros up to the end of the file, as a file does that grew
               without its data coming. It was never acknowledged: it is cut off, and that is said (`TornTail`)
    garbage    a length that no record has, with no record in what lies behind it: nothing that we wrote. It is cut off
               in the same way
    Corrupt    anything else that is not right: a whole frame whose hash does not fit, something bad with more behind
               it, a whole record under a length that is too long, or anything at all within a seal
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.protocol import records
from atoll.protocol.errors import AtollError
from atoll.protocol.records import AnyRecord
from atoll.store.disk import Corrupt, Disk, reading

MAGIC = b"atoll journal 3\n"
"""Its number is that of the records' format. 2: the run's step is in every round. 3: digests are XXH3."""
_ANY = b"atoll journal "
LAST, MORE = b"\n", b","
LONGEST_BYTES = 64 * 2**20
"""Of one record. The longest is Begun, with the names of all tensors."""

GARBAGE_BYTES = 2**18
"""Of what lies behind the last record are looked through; more of it is not judged."""

_HEAD = struct.Struct("<16sIIQ16s")
_FRAME = struct.Struct("<I16s")
_AHEAD_BYTES = 2**18

HEAD_BYTES = _HEAD.size + 16


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point between two records."""

    term: int
    offset: int
    hash: str
    """Of the chain so far, in hex."""


ORIGIN = Position(0, 0, bytes(16).hex())
"""Before the first record of a run."""


@dataclass(frozen=True, slots=True)
class TornTail:
    """What was cut off: an append that its writer did not finish."""

    file: Path
    offset: int
    size_bytes: int


def segment_path(folder: Path, term: int) -> Path:
    return folder / f"segment-{term:06d}.log"


def damaged(path: Path, offset: int, fact: str) -> Corrupt:
    return Corrupt(
        f"{path} is damaged at byte {offset}, {fact}: put back a copy of that file, or go on from a cut as a new run"
    )


# ---- writing ----------------------------------------------------------------------------------------------------


def encode_head(term: int, after: Position) -> bytes:
    head = _HEAD.pack(MAGIC, term, after.term, after.offset, bytes.fromhex(after.hash))
    return head + _link(b"", head)


def encode_append(at: Position, bodies: Iterable[bytes]) -> tuple[bytes, Position]:
    """The bytes of one append at a position, and the position behind it."""
    chain, parts = bytes.fromhex(at.hash), []
    for body in bodies:
        assert 0 < len(body) <= LONGEST_BYTES, f"a record of {len(body)} bytes"
        chain = _link(chain, body)
        parts += [_FRAME.pack(len(body), chain), body, MORE]
    parts[-1] = LAST
    data = b"".join(parts)
    return data, Position(at.term, at.offset + len(data), chain.hex())


def _link(chain: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(chain + body, digest_size=16).digest()


# ---- reading ----------------------------------------------------------------------------------------------------


def is_begun(folder: Path, term: int, disk: Disk) -> bool:
    """Whether anything lies behind the segment's head; its writer may have died before that."""
    return not _Ahead(disk, segment_path(folder, term), 0, None).zeros_behind(HEAD_BYTES)


def follows(folder: Path, term: int, disk: Disk) -> Position:
    """The position that a segment's head says it follows."""
    path = segment_path(folder, term)
    with reading(path):
        data = disk.read(path, 0, HEAD_BYTES)
    head, check = data[: _HEAD.size], data[_HEAD.size :]
    _check_format(path, head)
    if not head.startswith(MAGIC) or check != _link(b"", head):
        raise damaged(path, 0, "this is not how a segment begins")
    _, of_term, before, offset, chain = _HEAD.unpack(head)
    if of_term != term:
        raise damaged(path, 0, f"it is the segment of term {of_term}, under another name")
    return Position(before, offset, chain.hex())


def check_format(folder: Path, term: int, disk: Disk) -> None:
    """Of a segment of which only the end is read: records of another format might be taken for ours."""
    path = segment_path(folder, term)
    with reading(path):
        _check_format(path, disk.read(path, 0, len(MAGIC)))


def _check_format(path: Path, head: bytes) -> None:
    if head.startswith(_ANY) and not head.startswith(MAGIC):
        raise Corrupt(f"{path} was written by another version of Atoll: go on with the run with that version")


class Segment:
    """One segment, read append by append from a position on, up to its seal if it has one."""

    def __init__(self, folder: Path, at: Position, seal: Position | None, disk: Disk) -> None:
        self.path = segment_path(folder, at.term)
        self.at = at
        """Behind the last append that was read."""
        self._start, self._seal, self._disk = at, seal, disk
        self._number = 0
        self._ahead = _Ahead(disk, self.path, at.offset, seal.offset if seal else None)

    def next_append(self) -> list[tuple[Position, AnyRecord]]:
        """The records of the next append, each with the position behind it; none at the end."""
        batch: list[tuple[Position, AnyRecord]] = []
        at = self.at
        while (frame := self._next_frame(at)) is not None:
            body, closing, behind = frame
            batch.append((behind, self._decode(body, at)))
            at = behind
            if closing == LAST:
                self.at = at
                return batch
        return []

    def tail(self) -> TornTail | None:
        """What lies behind the last append; with a seal, only the check that the last append ends at it."""
        if self._seal is not None:
            if self.at != self._seal:
                raise self._damaged(self.at, f"nothing ends at byte {self._seal.offset}, where its successor sealed it")
            return None
        with reading(self.path):
            size = self._disk.size(self.path)
        if size < self.at.offset:
            raise self._damaged(self.at, f"the file ends at byte {size} already")
        return TornTail(self.path, self.at.offset, size - self.at.offset) if size > self.at.offset else None

    def _next_frame(self, at: Position) -> tuple[bytes, bytes, Position] | None:
        """The next body, its closing byte and the position behind it; None at the end and where it was torn."""
        chain, ahead = bytes.fromhex(at.hash), self._ahead
        ahead.go_to(at.offset)
        self._number += 1
        start = ahead.peek(_FRAME.size)
        if len(start) < _FRAME.size:
            return None
        length, expected = _FRAME.unpack(start)
        if length > LONGEST_BYTES:
            rest = ahead.peek(GARBAGE_BYTES + 1)
            if len(rest) > GARBAGE_BYTES or _holds_whole(chain, expected, rest[_FRAME.size :]) or _holds_record(rest):
                raise self._damaged(at, f"a length of {length} bytes cannot be")
            return None
        size = _FRAME.size + length + 1
        frame = ahead.peek(size)
        body, closing = frame[_FRAME.size : -1], frame[-1:]
        if len(frame) < size:
            if _holds_whole(chain, expected, frame[_FRAME.size :]):
                raise self._damaged(at, f"its length is not {length} bytes")
            return None
        if length and closing in (LAST, MORE) and _link(chain, body) == expected:
            return body, closing, Position(at.term, at.offset + size, expected.hex())
        if closing == b"\0" and ahead.zeros_behind(size):
            return None
        raise self._damaged(at, "its hash does not fit")

    def _decode(self, body: bytes, at: Position) -> AnyRecord:
        try:
            return records.decode(body)
        except (msgspec.MsgspecError, AtollError) as error:
            raise self._damaged(at, f"this version of Atoll cannot read it ({error})") from error

    def _damaged(self, at: Position, fact: str) -> Corrupt:
        behind = "" if self._start.offset == HEAD_BYTES else f" behind byte {self._start.offset}"
        return damaged(self.path, at.offset, f"record {self._number}{behind}: {fact}")


def _holds_whole(chain: bytes, expected: bytes, data: bytes) -> bool:
    """Whether some length would make a whole record of it: then it is not torn, its length was damaged."""
    body, start = hashlib.blake2b(chain, digest_size=16), 0
    for end, byte in enumerate(data):
        if byte in LAST + MORE:
            body.update(data[start:end])
            start = end
            if body.digest() == expected:
                return True
    return False


def _holds_record(data: bytes) -> bool:
    """Whether it may be something that we wrote: a record behind a damaged start, or a frame later on."""
    first, closing = _FRAME.size, LAST + MORE
    if any(data[end] in closing and _is_record(data[first:end]) for end in range(first + 1, len(data))):
        return True
    for start in range(1, len(data) - first):
        length, _ = _FRAME.unpack_from(data, start)
        end = start + first + length
        if length and end < len(data) and data[end] in closing and _is_record(data[start + first : end]):
            return True
    return False


def _is_record(body: bytes) -> bool:
    try:
        records.decode(body)
    except (msgspec.MsgspecError, AtollError):
        return False
    return True


class _Ahead:
    """The bytes of a file from an offset on, read in large pieces, up to `stop` where there is one."""

    def __init__(self, disk: Disk, path: Path, offset: int, stop: int | None) -> None:
        self._disk, self._path, self._stop = disk, path, stop
        self._data, self._start, self._at = b"", offset, offset

    def go_to(self, offset: int) -> None:
        self._at = offset

    def peek(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        if self._start + len(self._data) < self._at + size:
            kept = self._data[self._at - self._start :]
            self._data = kept + self._piece(self._at + len(kept), max(size - len(kept), _AHEAD_BYTES))
            self._start = self._at
        return self._data[self._at - self._start : self._at - self._start + size]

    def zeros_behind(self, size: int) -> bool:
        """Whether all that lies behind the next `size` bytes is zero."""
        offset = self._at + size
        while piece := self._piece(offset, _AHEAD_BYTES):
            if piece.strip(b"\0"):
                return False
            offset += len(piece)
        return True

    def _piece(self, offset: int, limit: int) -> bytes:
        if self._stop is not None:
            limit = min(limit, self._stop - offset)
        with reading(self._path):
            return self._disk.read(self._path, offset, limit) if limit > 0 else b""
