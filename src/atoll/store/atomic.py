"""Files that are either whole or not there, and lines that are never torn.

A file is written beside its final name, made durable, renamed over it, and the folder made durable too: after a crash
the old content or the new one is there, never a part. A line goes out with one write() on a descriptor opened for
appending, so that several processes may share a file.

A file, and a folder in a folder, is as open to others as the folder that it lies in, and never more than the umask
allows: a run's folder decides for all that is in it (rundir.py).
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
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


KEPT_LINES = 10_000
"""Lines that are kept while a disk is full; the oldest give way."""


class Appender:
    """Appends whole lines to a file; to be handed to an EventLog as its sink.

    What finds no room is kept, and written with the next line that does: a full disk must not end a process that only
    wanted to say so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._torn = False
        """The end of the file is a part of a line, by us."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, mode_in(path.parent))

    def __call__(self, line: bytes) -> None:
        assert line.endswith(b"\n") and line.count(b"\n") == 1, "one line at a time"
        assert self._descriptor is not None, f"{self.path} is closed"
        self._kept.append(line)
        try:
            while self._kept:
                self._write_all(self._descriptor, self._kept[0])
                self._kept.popleft()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _write_all(self, descriptor: int, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(descriptor, data)
        self._torn = written < len(data)
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
