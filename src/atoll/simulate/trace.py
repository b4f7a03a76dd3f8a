"""The hash of all that happened: equal traces mean equal worlds, on any machine and in any process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

FLUSH_BYTES = 1 << 16
NAMES: dict[str, str] = {}
"""What events were called before they were renamed, for comparisons with older traces (tools/traces.py)."""


class Trace:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._buffer = bytearray()
        self._encode = msgspec.msgpack.Encoder().encode_into

    def add(self, at: float, who: str, event: Any, effects: Sequence[Any]) -> None:
        """What a machine was told, and what it wants done."""
        buffer = self._buffer
        name = type(event).__name__
        self._encode((at, who, NAMES.get(name, name), event, effects), buffer, -1)
        if len(buffer) > FLUSH_BYTES:
            self._hash.update(buffer)
            buffer.clear()

    def hexdigest(self) -> str:
        self._hash.update(self._buffer)
        self._buffer.clear()
        return self._hash.hexdigest()
