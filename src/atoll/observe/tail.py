"""Reads the run's events while others still write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.telemetry.events import Event

_CHUNK = 1 << 20
_ROUND = b'"kind":"round"'


class EventTail:
    """What has been appended since the last look. A last line that is still being written waits for the next one.

    `most_bytes`: what lies further back than this is passed over; `near_bytes`: so are rounds further back than this,
    which make up nearly all of a long file.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, near_bytes: int | None = None) -> None:
        self.path = path
        self._most_bytes, self._near_bytes = most_bytes, near_bytes
        self._offset = 0
        self._rest = b""

    def skip_to_end(self) -> None:
        """Pass over all that is there by now."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def read_new(self) -> list[Event]:
        return list(self.new_events())

    def new_events(self) -> Iterator[Event]:
        """The same, without holding all of them at once."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                self._skip(size)
                near = size - self._near_bytes if self._near_bytes is not None else 0
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    far = self._offset + len(chunk) < near
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    wanted = (line for line in lines if not (far and _ROUND in line[:64]))
                    yield from (event for line in wanted if (event := _decode(line)) is not None)
        except FileNotFoundError:
            return

    def _skip(self, size: int) -> None:
        if self._most_bytes is not None and size - self._offset > self._most_bytes:
            self._offset, self._rest = size - self._most_bytes, b""


def _decode(line: bytes) -> Event | None:
    """None for a line that was torn by a full disk or a kill: nothing a reader could mend."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "at" in event and "kind" in event else None
