"""The events of a run, as one file or several: events.jsonl, and its earlier parts in events/.

Once events.jsonl has `PART_BYTES` the syncer moves it to events/000000000000000.jsonl, where the number is the byte of
all the run's events at which the part begins. Readers count bytes over all parts, so an offset stays good when a part
is moved. A writer holds a lock on the file while it writes a line, so that no line comes into a part that was moved
(`Appender`). Parts may be removed, the oldest first: readers begin with the first that is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from atoll.store.atomic import make_folder

PART_BYTES = 64 * 1024 * 1024
_CHUNK = 1 << 20


class EventsPart(NamedTuple):
    begin: int
    """Its first byte, in the bytes of all parts."""
    path: Path


def list_parts(events: Path) -> list[EventsPart]:
    """In order; the last is events.jsonl, whether it is there or not."""
    folder = events.with_suffix("")
    earlier: list[EventsPart] = []
    if folder.is_dir() and not folder.is_symlink():
        names = (path for path in folder.glob("*.jsonl") if path.stem.isdigit() and not path.is_symlink())
        earlier = sorted(EventsPart(int(path.stem), path) for path in names)
    begin = earlier[-1].begin + earlier[-1].path.stat().st_size if earlier else 0
    return [*earlier, EventsPart(begin, events)]


class OpenPart(NamedTuple):
    begin: int
    end: int
    file: IO[bytes]


@contextmanager
def open_parts(events: Path, begin: int = 0) -> Iterator[list[OpenPart]]:
    """Those that hold bytes from `begin` on, as they are now."""
    while True:
        parts = list_parts(events)
        ends = [*(part.begin for part in parts[1:]), None]
        with ExitStack() as stack:
            opened: list[OpenPart] = []
            for part, end in zip(parts, ends, strict=True):
                if (end is None or end > begin) and part.path.exists():
                    file = stack.enter_context(part.path.open("rb"))
                    size = os.fstat(file.fileno()).st_size
                    opened.append(OpenPart(part.begin, part.begin + size if end is None else end, file))
            if len(list_parts(events)) == len(parts):  # else one was moved meanwhile
                yield opened
                return


def events_size(events: Path) -> int:
    """Bytes of all parts."""
    last = list_parts(events)[-1]
    return last.begin + (last.path.stat().st_size if last.path.exists() else 0)


def read_chunks(parts: list[OpenPart], begin: int) -> Iterator[bytes]:
    """The bytes from `begin` on, and what is appended to the last part while they are read."""
    for part in parts:
        if begin < part.end or part is parts[-1]:
            part.file.seek(max(0, begin - part.begin))
            while chunk := part.file.read(_CHUNK):
                yield chunk


def read_events(events: Path, begin: int = 0, most: int | None = None) -> bytes:
    """The bytes from `begin` on, at most so many."""
    found, left = bytearray(), most
    with open_parts(events, begin) as parts:
        for chunk in read_chunks(parts, begin):
            found += chunk if left is None else chunk[: left - len(found)]
            if left is not None and len(found) >= left:
                break
    return bytes(found)


def read_lines(events: Path) -> list[bytes]:
    return read_events(events).splitlines(keepends=True)


def begin_part(events: Path) -> None:
    """Move events.jsonl to the earlier parts; its writers make it anew. For whoever has it locked."""
    folder = events.with_suffix("")
    if folder.is_symlink():
        return  # it could lead anywhere
    last = list_parts(events)[-1]
    make_folder(folder)
    os.rename(last.path, folder / f"{last.begin:015d}.jsonl")
