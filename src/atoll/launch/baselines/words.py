"""What a rank says: lines of JSON in its log, which its next life goes on writing to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Words = dict[str, Any]


class Heard:
    """New lines of one log, each once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0
        self._rest = b""

    def new(self) -> list[Words]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        return [words for line in lines if (words := _parsed(line)) is not None]


def _parsed(line: bytes) -> Words | None:
    """None for what is no message: warnings of libraries, and a line that a kill cut off, with the next behind it."""
    start = line.rfind(b'{"kind"')
    if start < 0:
        return None
    try:
        return dict(json.loads(line[start:]))
    except ValueError:
        return None
