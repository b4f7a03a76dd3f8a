"""A tape in a file of its own: the records of a run that was never run, in the form of the first journal segment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.protocol import records
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import AnyRecord, Begun
from atoll.store.atomic import write_atomic
from atoll.store.disk import Corrupt, DiskFailed, LocalDisk
from atoll.store.journal import read
from atoll.store.segments import HEAD_BYTES, ORIGIN, Position, encode_append, encode_head, segment_path


def write_tape(path: Path, lines: Sequence[AnyRecord]) -> None:
    """Whole, or not at all."""
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
    if tails or not lines or not isinstance(lines[0], Begun):
        raise ConfigError(f"{path} is not a whole tape: make it again with atoll simulate tape")
    return lines
