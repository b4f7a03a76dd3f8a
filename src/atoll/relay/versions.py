"""Versions at a relay: each is fetched once and served to all of its learners.

Rules:
- what is served is at least as new as the newest version that was announced to anybody here;
- several that ask for the same at once wait for one fetch;
- a fragment is kept whole, or as the steps from one version: in the form in which the syncer served it. A whole one
  answers everybody; steps answer whoever holds that version;
- version 0 in 2 bytes a value answers only a reader that asks for that form;
- of each fragment only the newest version is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.fabric.wire import CODEC_HEADER, VERSION_HEADER

WHOLE = -1
"""In place of the version that a reader holds: it gets the fragment whole."""
CODED = -2
"""Also in its place: the reader gets it whole, and takes version 0 in 2 bytes a value (numerics/initial.py)."""


class KeptVersion(NamedTuple):
    version: int
    headers: dict[str, str]
    data: bytearray
    steps: bool


FetchVersion = Callable[[], Awaitable[KeptVersion]]


@dataclass(slots=True)
class VersionCopies:
    newest: dict[int, int] = field(default_factory=dict)
    """By fragment, as announced."""
    _kept: dict[tuple[int, int], KeptVersion] = field(default_factory=dict)
    """Copies by fragment and the version that its reader holds, WHOLE or CODED."""
    _coming: dict[tuple[int, int], asyncio.Task[KeptVersion]] = field(default_factory=dict)
    served: int = 0
    """Answers that needed no fetch of their own."""

    def note_version(self, fragment: int, version: int) -> None:
        if version > self.newest.get(fragment, -1):
            self.newest[fragment] = version
            for key in [key for key, kept in self._kept.items() if key[0] == fragment and kept.version < version]:
                del self._kept[key]

    def find(self, fragment: int, have: int) -> KeptVersion | None:
        for key in ((fragment, WHOLE), (fragment, have)):
            kept = self._kept.get(key)
            if kept is not None and kept.version >= self.newest.get(fragment, 0):
                return kept
        return None

    async def get(self, fragment: int, have: int, fetch: FetchVersion) -> KeptVersion:
        """`fetch` raises what goes wrong; whoever waits for the same hears it too."""
        if (kept := self.find(fragment, have)) is not None:
            self.served += 1
            return kept
        key = (fragment, have)
        if (task := self._coming.get(key)) is not None:
            self.served += 1
        else:
            task = self._coming[key] = asyncio.ensure_future(fetch())
            task.add_done_callback(lambda done: self._note_fetched(key, done))
        return await asyncio.shield(task)

    def _note_fetched(self, key: tuple[int, int], done: asyncio.Task[KeptVersion]) -> None:
        del self._coming[key]
        if done.cancelled() or done.exception() is not None:
            return
        self.keep_version(*key, done.result())

    def keep_version(self, fragment: int, have: int, found: KeptVersion) -> None:
        """One that was fetched for whoever holds version `have`."""
        self.note_version(fragment, found.version)
        if found.version >= self.newest.get(fragment, 0):
            self._kept[fragment, have if found.steps or CODEC_HEADER in found.headers else WHOLE] = found

    def clear(self) -> None:
        """Another run, or another term: nothing of before is served any more."""
        self.newest.clear()
        self._kept.clear()


def version_of(headers: dict[str, str]) -> int:
    """−1: it says none."""
    value = headers.get(VERSION_HEADER, "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 16 else -1
