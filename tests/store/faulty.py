"""A disk in memory that runs full, breaks, takes fewer bytes than it was given, and loses power at any byte.

It keeps two pictures: what a living process sees, and what is durable. A name is durable once its folder was synced,
bytes once their file was. `crash` leaves what a power cut may leave.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.store.disk import Buffer

FOLDER = Path("journal")

Left = Literal["forgotten", "kept", "grown"]
"""Of what was written and not synced, a power cut leaves nothing, all of it, or all of it and zeros for the rest."""


class PowerCut(BaseException):
    """The process is gone in the middle of what it did: nothing below may catch this and go on."""


@dataclass
class _Content:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    meant_bytes: int = 0
    """How long the file would be, had its last write not been cut off."""


class FaultyFile:
    def __init__(self, disk: FaultyDisk, path: Path, content: _Content) -> None:
        self._disk, self._path, self._content = disk, path, content

    def write(self, data: Buffer) -> int:
        raw = bytes(data)
        taken = self._disk.take(len(raw))
        self._content.meant_bytes = len(self._content.data) + len(raw)
        self._content.data += raw[:taken]
        self._disk.calls.append(("write", self._path.name))
        if self._disk.until_power_cut == 0 and taken < len(raw):
            raise PowerCut
        return taken

    def datasync(self) -> None:
        self._disk.synced(self._path)
        self._content.durable = bytes(self._content.data)

    def truncate(self, size: int) -> None:
        if self._disk.truncate_error:
            raise _error(self._disk.truncate_error)
        del self._content.data[size:]
        self._content.meant_bytes = size

    def close(self) -> None:
        pass


class FaultyInPlaceFile:
    """Of a write that the power cut interrupts, the first bytes are written, and the rest is as it was."""

    def __init__(self, disk: FaultyDisk, path: Path, content: _Content) -> None:
        self._disk, self._path, self._content = disk, path, content

    def write_at(self, offset: int, data: bytes) -> None:
        taken = self._disk.take(len(data))
        self._content.data[offset : offset + taken] = data[:taken]
        self._disk.calls.append(("write", self._path.name))
        if taken < len(data):
            if self._disk.until_power_cut == 0:
                raise PowerCut
            raise _error(errno.ENOSPC)

    def datasync(self) -> None:
        self._disk.synced(self._path)
        self._content.durable = bytes(self._content.data)

    def close(self) -> None:
        pass


class FaultyDisk:
    def __init__(self) -> None:
        self.room_bytes: int | None = None
        """How much it still takes; None: no limit."""
        self.most_bytes: int | None = None
        """The most that a single write takes."""
        self.until_power_cut: int | None = None
        """So many more bytes are written, then the power is cut."""
        self.sync_error = 0
        self.truncate_error = 0
        self.read_error = 0
        self.calls: list[tuple[str, str]] = []
        """Every write and sync, in order, with the name of its file."""
        self.reads: list[tuple[str, int, int]] = []
        """(name, first byte, byte behind the last) of every read that found something."""
        self._files: dict[Path, _Content] = {}
        self._durable: dict[Path, _Content] = {}

    # ---- what the journal asks for -----------------------------------------------------------------------------------

    def create(self, path: Path) -> FaultyFile:
        if path in self._files:
            raise _error(errno.EEXIST)
        if self.room_bytes == 0:
            raise _error(errno.ENOSPC)
        self._files[path] = _Content()
        return FaultyFile(self, path, self._files[path])

    def create_in_place(self, path: Path, size: int) -> FaultyInPlaceFile:
        self.create(path)
        self._files[path].data = bytearray(size)
        self._files[path].meant_bytes = size
        return FaultyInPlaceFile(self, path, self._files[path])

    def read(self, path: Path, offset: int, limit: int) -> bytes:
        if self.read_error:
            raise _error(self.read_error)
        found = bytes(self._content(path).data[offset : offset + limit])
        if found:
            self.reads.append((path.name, offset, offset + len(found)))
        return found

    def size(self, path: Path) -> int:
        return len(self._content(path).data)

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in self._files if path.parent == folder]

    def remove(self, path: Path) -> None:
        self._content(path)
        del self._files[path]

    def sync(self, path: Path) -> None:
        self.synced(path)
        if path in self._files:
            self._files[path].durable = bytes(self._files[path].data)
        else:
            self._durable = {name: content for name, content in self._durable.items() if name.parent != path}
            self._durable |= {name: content for name, content in self._files.items() if name.parent == path}

    # ---- what tests ask for ------------------------------------------------------------------------------------------

    def crash(self, left: Left | dict[str, Left] = "forgotten", *, names_kept: bool = False) -> None:
        """The power was cut: what is there when it comes back, for all files or by their first letters."""
        self.until_power_cut = None
        if not names_kept:
            self._files = dict(self._durable)
        for path, content in self._files.items():
            how = left if isinstance(left, str) else next(left[start] for start in left if path.name.startswith(start))
            now = content.durable if how == "forgotten" else bytes(content.data)
            content.data = bytearray(now.ljust(content.meant_bytes, b"\0") if how == "grown" else now)
            content.durable = bytes(content.data)

    def bytes_of(self, name: str) -> bytes:
        return bytes(self._content(FOLDER / name).data)

    def put(self, name: str, data: bytes) -> None:
        """Replace what a file holds, behind everybody's back."""
        content = self._files.setdefault(FOLDER / name, _Content())
        content.data, content.durable = bytearray(data), data

    # ---- inside ------------------------------------------------------------------------------------------------------

    def take(self, asked: int) -> int:
        """How many bytes a write takes."""
        if self.room_bytes == 0:
            raise _error(errno.ENOSPC)
        limits = (self.room_bytes, self.most_bytes, self.until_power_cut)
        taken = min([asked, *(limit for limit in limits if limit is not None)])
        if self.room_bytes is not None:
            self.room_bytes -= taken
        if self.until_power_cut is not None:
            self.until_power_cut -= taken
        return taken

    def synced(self, path: Path) -> None:
        if self.until_power_cut == 0:
            raise PowerCut
        if self.sync_error:
            raise _error(self.sync_error)
        self.calls.append(("sync", path.name))

    def _content(self, path: Path) -> _Content:
        if path not in self._files:
            raise _error(errno.ENOENT)
        return self._files[path]


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
