"""A disk that can be made full or slow while a run goes on. A small file tells the syncer's process:

    {"full": true}        every write to the journal finds no room
    {"sync_s": 0.2}       every sync takes so much longer

The file is trouble.json in the run's folder; without it the disk behaves normally.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec

from atoll.digests import Buffer
from atoll.store.disk import LocalDisk, LocalFile
from atoll.store.rundir import RunDir


class Trouble(msgspec.Struct, frozen=True):
    full: bool = False
    sync_s: float = 0.0

    def write(self, path: Path) -> None:
        """From now on."""
        made = path.with_suffix(".new")
        made.write_bytes(msgspec.json.encode(self))
        made.replace(path)

    @staticmethod
    def clear(path: Path) -> None:
        path.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Trouble:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()


NAME = "trouble.json"
DISK = "atoll.chaos.trouble:disk_of"
"""What a syncer is told by `--disk`, so that its journal lies on one that can be troubled."""


def disk_of(out: RunDir) -> TroubledDisk:
    """Of a run under a plan of faults."""
    return TroubledDisk(out.path / NAME)


class TroubledFile(LocalFile):
    def __init__(self, file: LocalFile, told: Path) -> None:
        super().__init__(file._descriptor)
        self._told = told

    def write(self, data: Buffer) -> int:
        if Trouble.read(self._told).full:
            raise OSError(errno.ENOSPC, "no room, as the plan of faults says")
        return super().write(data)

    def datasync(self) -> None:
        time.sleep(Trouble.read(self._told).sync_s)
        super().datasync()


class TroubledDisk(LocalDisk):
    def __init__(self, told: Path) -> None:
        self._told = told

    def create(self, path: Path) -> LocalFile:
        if Trouble.read(self._told).full:
            raise OSError(errno.ENOSPC, "no room, as the plan of faults says")
        return TroubledFile(super().create(path), self._told)
