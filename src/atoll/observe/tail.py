"""Reads the run's events while others still write them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.telemetry.events import Event

_CHUNK = 1 << 20


class EventTail:
    """What has been appended since the last look. A last line that is still being written waits for the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def read_new(self) -> list[Event]:
        events: list[Event] = []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    events.extend(event for line in lines if (event := _decode(line)) is not None)
        except FileNotFoundError:
            return []
        return events


def _decode(line: bytes) -> Event | None:
    """None for a line that was torn by a full disk or a kill: nothing a reader could mend."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "at" in event and "kind" in event else None
