"""Large files are removed bit by bit.

To free gigabytes at once holds up every sync on that disk: the unlink of 4 GB took 6 s on ext4 mounted with `discard`,
and while it went on commits beside it took forty times as long. So a large file, or a folder of such, loses its name at
once, and a thread shortens it step by step, with rests, until nothing is left. Where more waits to be removed it takes
no rests: room must come back as fast as it is used. Who ends in good order calls `finish_removals`; what a process did
not come to, the next removal in that folder goes on with.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

GONE = ".gone-"
"""What the names of removed files begin with until nothing is left of them."""
LARGE_BYTES = 64 * 2**20
"""Less is removed at once."""
STEP_BYTES = 16 * 2**20
READERS_S = 10.0
"""Before the first step: whoever has the file open reads on."""


class Remover:
    def __init__(self, readers_s: float = READERS_S) -> None:
        self._readers_s = readers_s
        self._queue: SimpleQueue[tuple[Path, float]] = SimpleQueue()
        self._lock = threading.Lock()
        self._known: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._hurried = threading.Event()

    def remove_file(self, path: Path) -> None:
        """Once this returns its name is free. OSError as by unlink: it is not there, or a folder."""
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._remove(path)

    def remove_folder(self, path: Path) -> None:
        """With all that is in it."""
        self._remove(path)

    def _remove(self, path: Path) -> None:
        if _count_bytes(path) < LARGE_BYTES:
            _remove_now(path)
        else:
            gone = _name_gone(path)
            path.rename(gone)
            self._take(gone)
        for left in path.parent.glob(f"{GONE}*"):
            self._take(left)

    def replace(self, draft: Path, path: Path) -> None:
        """As draft.replace(path); what lay there is removed bit by bit."""
        gone = None
        if path.is_file() and path.stat().st_size >= LARGE_BYTES:
            with suppress(OSError):  # no second names on this file system: the old one goes at once
                os.link(path, gone := _name_gone(path))
        draft.replace(path)
        if gone is not None and gone.exists():
            self._take(gone)

    def finish(self) -> None:
        """Remove what is left, without rests: nobody commits to that disk any more."""
        self._hurried.set()
        self.wait_until_done()
        self._hurried.clear()

    def wait_until_done(self) -> None:
        while True:
            with self._lock:
                if (thread := self._thread) is None:
                    return
            thread.join()

    def _take(self, gone: Path) -> None:
        with self._lock:
            if gone in self._known:
                return
            self._known.add(gone)
            self._queue.put((gone, time.monotonic()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._shorten_all, name="atoll-removal", daemon=True)
                self._thread.start()

    def _shorten_all(self) -> None:
        while True:
            with self._lock:
                if self._queue.empty():
                    self._thread = None
                    return
                gone, since = self._queue.get()
            self._hurried.wait(max(0.0, since + self._readers_s - time.monotonic()))
            with suppress(OSError):  # it is tried again with the next removal there
                for file in _list_files(gone):
                    self._shorten(file)
                _remove_now(gone)
            with self._lock:
                self._known.discard(gone)

    def _shorten(self, file: Path) -> None:
        left = file.stat().st_size
        while left > 0 and not self._hurried.is_set():
            left = max(0, left - STEP_BYTES)
            began = time.perf_counter()
            os.truncate(file, left)
            self._rest(time.perf_counter() - began)

    def _rest(self, seconds: float) -> None:
        if self._queue.empty():
            self._hurried.wait(seconds)


def _name_gone(path: Path) -> Path:
    return path.with_name(f"{GONE}{os.urandom(4).hex()}-{path.name}")


def _count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _list_files(path))


def _list_files(path: Path) -> list[Path]:
    if path.is_dir() and not path.is_symlink():
        return [one for one in path.rglob("*") if one.is_file() and not one.is_symlink()]
    path.lstat()  # FileNotFoundError
    return [] if path.is_symlink() else [path]


def _remove_now(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_REMOVER = Remover()
remove_gently, remove_folder_gently, replace_gently = _REMOVER.remove_file, _REMOVER.remove_folder, _REMOVER.replace
finish_removals = _REMOVER.finish
