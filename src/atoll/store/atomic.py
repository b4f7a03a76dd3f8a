"""Files that are either whole or not there, and lines that are never torn.

A file is written beside its final name, made durable, renamed over it, and the folder made durable too: after a crash
the old content or the new one is there, never a part. A line goes out with one write() on a descriptor opened for
appending, so that several processes may share a file.

A file, and a folder in a folder, is as open to others as the folder that it lies in, and never more than the umask
allows: a run's folder decides for all that is in it (rundir.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from atoll.store.removal import replace_gently


def mode_in(folder: Path) -> int:
    """The mode of a file that is made there, before the umask."""
    return folder.stat().st_mode & 0o666


def make_folder(path: Path) -> None:
    """With those above it; one that is there stays as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=path.parent.stat().st_mode & 0o777, exist_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """The file holds exactly `data`, durably, once this returns."""
    with staged(path) as draft:
        draft.write_bytes(data)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A name to write to; what lies there at the end becomes `path`, or nothing changes if the block raises."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        draft.touch(mode_in(path.parent), exist_ok=False)
        mode = draft.stat().st_mode
        yield draft
        # Whoever wrote may have made the file anew and private (safetensors does): its folder says how open it is.
        draft.chmod(mode)
        sync_path(draft)
        replace_gently(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_back(descriptor: int, written: int) -> bool:
    """Cut off the part of a line that was just appended, unless another process writes too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if end != os.fstat(descriptor).st_size:
            return False
        os.ftruncate(descriptor, end - written)
    except OSError:
        return False
    return True


KEPT_LINES = 10_000
"""Lines that are kept while a disk is full; the oldest give way."""


class Appender:
    """Appends whole lines to a file; to be handed to an EventLog as its sink.

    What finds no room is kept, and written with the next line that does: a full disk must not end a process that only
    wanted to say so. Where another process has moved the file away (event_parts.py), it is made anew.
    """

    def __init__(self, path: Path, most_bytes: int = 0, move_away: Callable[[Path], None] | None = None) -> None:
        """`move_away`: called with the path once the file has `most_bytes`, while nobody writes to it."""
        self.path = path
        self._most_bytes, self._move_away = most_bytes, move_away
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._torn = False
        """The end of the file is a part of a line, by us."""
        self._descriptor: int | None = self._open()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.path, flags, mode_in(self.path.parent))

    def __call__(self, line: bytes) -> None:
        assert line.endswith(b"\n") and line.count(b"\n") == 1, "one line at a time"
        assert self._descriptor is not None, f"{self.path} is closed"
        self._kept.append(line)
        try:
            with self._locked(fcntl.LOCK_SH) as descriptor:
                while self._kept:
                    self._write_all(descriptor, self._kept[0])
                    self._kept.popleft()
                is_full = self._move_away is not None and os.fstat(descriptor).st_size >= self._most_bytes
            if is_full:
                self._move_file()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    @contextmanager
    def _locked(self, how: int) -> Iterator[int]:
        """The file that has the name now."""
        while True:
            assert self._descriptor is not None
            descriptor = self._descriptor
            with suppress(OSError):  # a file system without locks has one writer at a time, or none that moves
                fcntl.flock(descriptor, how)
            try:
                if self._has_name(descriptor):
                    yield descriptor
                    return
            finally:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            self._descriptor = self._open()
            os.close(descriptor)

    def _has_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _move_file(self) -> None:
        assert self._move_away is not None
        with self._locked(fcntl.LOCK_EX) as descriptor:
            if os.fstat(descriptor).st_size >= self._most_bytes:
                self._move_away(self.path)

    def _write_all(self, descriptor: int, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(descriptor, data)
        self._torn = written < len(data)
        if self._torn and _take_back(descriptor, written):
            self._torn = False
            raise OSError(errno.ENOSPC, "a line was written in part, and taken back", str(self.path))
        if self._torn:
            # End the torn line, now or before the next, so that the next stands for itself; readers skip what is torn.
            with suppress(OSError):
                self._torn = os.write(descriptor, b"\n") == 0
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of a line were written", str(self.path))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Appender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
