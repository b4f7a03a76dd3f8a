"""What the journal asks of a disk, and how a disk may fail.

The journal writes and reads through a `Disk`, so that tests can give it one that runs full, breaks or loses power
(tests/store/faulty.py). These calls raise OSError like the system calls they stand for; the journal turns it into

    NoRoom       the disk is full: nothing was written, and the same append may be retried once there is room
    DiskFailed   anything else: the state of the disk is unknown, so nothing more is written to it
    Corrupt      what was read is not what was written

A failed datasync is never retried: the kernel may have dropped the pages it could not write, and report success the
next time.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from atoll.digests import Buffer
from atoll.protocol.errors import AtollError
from atoll.store.atomic import make_folder, mode_in
from atoll.store.removal import remove_gently

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LARGE = 1 << 20
"""Bytes that are worth a call to the kernel, or a rest."""
_AGAIN = "look after the disk, then start the syncer again: it goes on from what is durable"


# Not everywhere is there an fdatasync (macOS); fsync does more than is needed.
datasync = getattr(os, "fdatasync", os.fsync)


class NoRoom(AtollError):
    """The disk is full; nothing changed, and the append may be retried."""


class DiskFailed(AtollError):
    """A write or sync failed: nothing more is written."""

    exit_code = 4


class Corrupt(AtollError):
    """Bytes at rest have changed, or some are missing that were acknowledged."""

    exit_code = 4


class AppendFile(Protocol):
    """A file open for appending."""

    def write(self, data: Buffer) -> int:
        """Append; how many bytes it took, which may be fewer than asked."""

    def datasync(self) -> None:
        """Everything written so far is durable once this returns."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class InPlaceFile(Protocol):
    """A file of a fixed size that is overwritten in place."""

    def write_at(self, offset: int, data: bytes) -> None:
        """Overwrite these bytes; a crash may leave some of them as they were."""

    def datasync(self) -> None:
        """Everything written so far is durable once this returns."""

    def close(self) -> None: ...


class Disk(Protocol):
    def create(self, path: Path) -> AppendFile:
        """A new file; FileExistsError if the name is taken. Its name is durable once its folder was synced."""

    def create_in_place(self, path: Path, size: int) -> InPlaceFile:
        """A new file of `size` zeros, and its folder if that is missing; names and errors as with `create`."""

    def read(self, path: Path, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes; fewer only at the end of the file."""

    def size(self, path: Path) -> int: ...

    def names(self, folder: Path) -> list[str]: ...

    def remove(self, path: Path) -> None: ...

    def sync(self, path: Path) -> None:
        """Make a file, or the names in a folder, durable: whoever wrote them."""


class LocalFile:
    """What lies on the disk is not kept in memory too, but for short files: nobody reads a payload before a recovery,
    and a file that only grows would take fresh pages for every round, which cost more than the copy into them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._open = True
        self._cached = 0

    def write(self, data: Buffer) -> int:
        taken = os.write(self._descriptor, data)
        self._cached += taken
        return taken

    def datasync(self) -> None:
        datasync(self._descriptor)
        if self._cached >= _LARGE and hasattr(os, "posix_fadvise"):  # not on macOS
            with suppress(OSError):  # it is advice: what is durable stays so
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._cached = 0

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        if self._open:
            os.close(self._descriptor)
        self._open = False


class LocalInPlaceFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._open = True

    def write_at(self, offset: int, data: bytes) -> None:
        if os.pwrite(self._descriptor, data, offset) < len(data):
            raise OSError(errno.EIO, "a write within a file was cut short")

    def datasync(self) -> None:
        datasync(self._descriptor)

    def close(self) -> None:
        if self._open:
            os.close(self._descriptor)
        self._open = False


class LocalDisk:
    def create(self, path: Path) -> LocalFile:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return LocalFile(os.open(path, flags, mode_in(path.parent)))

    def create_in_place(self, path: Path, size: int) -> LocalInPlaceFile:
        make_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode_in(path.parent))
        file = LocalInPlaceFile(descriptor)
        try:
            # Zeros that are written, and no hole: what is overwritten later has its place on the disk.
            file.write_at(0, bytes(size))
        except OSError:
            file.close()
            path.unlink()
            raise
        return file

    def read(self, path: Path, offset: int, limit: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def remove(self, path: Path) -> None:
        remove_gently(path)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- gigabytes in the background ------------------------------------------------------------------------------------

PIECE_BYTES = 32 * 2**20
"""A thread of the training process writes and hashes them. Around each it takes the interpreter's lock from the loop
that launches steps, so they are large: while a cut was written in pieces of 1 MiB, steps took up to a fifth longer."""
MOST_REST_S = 10.0
"""Of a file: a cut waits for its parts `cut_wait_s`, a minute."""


class Rests:
    """Whoever writes gigabytes while a run goes on leaves the disk to others for as long as each sync took: on one of
    1.1 GB/s, commits of 28 MB every 46 ms beside a cut then take no longer than without it."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._left_s = MOST_REST_S

    def rest(self, seconds: float) -> None:
        seconds = min(seconds, self._left_s)
        self._left_s -= seconds
        if seconds > 0:
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def end(self) -> None:
        """Somebody waits for the file: no rest is taken any more, and the one that is being taken ends."""
        self._ended.set()


def sync_between(file: IO[bytes], pieces: Iterable[memoryview], rests: Rests | None = None) -> Iterator[memoryview]:
    """Each piece, to be written by whoever takes it; synced as they come, and whole at the end. Gigabytes that are
    synced all at once would hold up whoever syncs a little file meanwhile: the syncer its journal, round by round, on
    the same disk. A sync for every small tensor would take as long."""
    waiting = 0
    for piece in pieces:
        yield piece
        waiting += piece.nbytes
        if waiting >= PIECE_BYTES:
            _sync(file, waiting, rests)
            waiting = 0
    _sync(file, waiting, rests)


def _sync(file: IO[bytes], written: int, rests: Rests | None) -> None:
    began = time.perf_counter()
    file.flush()
    datasync(file.fileno())
    if rests is not None and written >= _LARGE:
        rests.rest(time.perf_counter() - began)


def cut_in_pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[place : place + PIECE_BYTES] for place in range(0, data.nbytes, PIECE_BYTES))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into the error that the operator sees."""
    try:
        yield
    except OSError as error:
        raise failed(error, "read", path) from error


def failed(error: OSError, doing: str, path: Path) -> DiskFailed:
    return DiskFailed(f"cannot {doing} {path}: {error.strerror or error}; {_AGAIN}")


def not_written(error: OSError, path: Path) -> NoRoom | DiskFailed:
    """The error for a file that could not be created or did not take all its bytes."""
    if error.errno in _FULL:
        return NoRoom(f"no room for {path}: {error.strerror or error}; make room on that disk, nothing is lost yet")
    return failed(error, "write", path)


def delete(path: Path, disk: Disk) -> None:
    try:
        with suppress(FileNotFoundError):
            disk.remove(path)
    except OSError as error:
        raise failed(error, "delete", path) from error


def make_durable(path: Path, disk: Disk) -> None:
    try:
        disk.sync(path)
    except OSError as error:
        raise failed(error, "make durable", path) from error


class GrowingFile:
    """A new file that grows by whole appends."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.size = path, 0
        self._kept, self._durable = 0, 0
        try:
            self._file = disk.create(path)
        except OSError as error:
            raise not_written(error, path) from error

    def write(self, data: Buffer) -> None:
        rest = memoryview(data)
        try:
            while rest.nbytes:
                taken = self._file.write(rest)
                self.size += taken
                rest = rest[taken:]
        except OSError as error:
            raise not_written(error, self.path) from error

    def datasync(self) -> None:
        if self._durable == self.size:
            return
        try:
            self._file.datasync()
        except OSError as error:
            raise failed(error, "make durable", self.path) from error
        self._durable = self.size

    def mark_kept(self) -> None:
        """Everything written so far is kept by `cut_back`."""
        self._kept = self.size

    def cut_back(self) -> None:
        """Truncate to what was kept. Durable, so that a crash during the retry leaves no mixture of two appends."""
        if self.size == self._kept:
            return
        try:
            self._file.truncate(self._kept)
        except OSError as error:
            raise failed(error, "cut back", self.path) from error
        self.size = self._kept
        self._durable = -1
        self.datasync()

    def close(self) -> None:
        self._file.close()
