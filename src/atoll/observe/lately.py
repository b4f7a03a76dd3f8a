"""The rounds of late, as far as the run may be rolled back: what each fragment held after each, and who gave what.

They are kept back to the oldest cut that the run may have gone back to; of what was before, nothing is compared.
"""

from __future__ import annotations

from atoll.observe.findings import Wrong
from atoll.protocol.records import Merged, Restored
from atoll.protocol.restoring import undone


class Lately:
    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._since = 0
        """Rounds before this one are not known any more."""
        self._merged: list[Merged] = []
        self._digests: list[tuple[int, int, str]] = []
        """From how many rounds on, fragment, digest of the values from then on; in that order."""

    def merged(self, record: Merged) -> None:
        self._merged.append(record)
        self._digests.append((record.round + 1, record.fragment, record.digest))

    def forget(self, before: int) -> None:
        """What lies before this round, but for what each fragment held then."""
        self._since = max(self._since, before)
        self._merged = [one for one in self._merged if one.round >= self._since]
        held = self._held(self._since)
        self._digests = [one for one in self._digests if one[0] > self._since]
        self._digests[:0] = [(self._since, fragment, mark) for fragment, mark in sorted(held.items())]

    def _held(self, rounds: int) -> dict[int, str]:
        """After so many rounds; of version 0 no record tells the digest."""
        return {fragment: mark for since, fragment, mark in self._digests if since <= rounds}

    def check(self, record: Restored) -> None:
        """Wrong says what it rolls back to, or undoes, that the records before it do not give."""
        if record.round >= self._since:
            held = self._held(record.round)
            differ = [f for f, mark in enumerate(record.digests) if held.get(f, mark) != mark]
            if differ:
                raise Wrong(f"the run is rolled back to round {record.round}, but fragment {differ[0]} to other values")
            if (due := undone(self._merged, record.round, self._fragments)) != record.undone:
                raise Wrong(f"the rollback to round {record.round} undoes {record.undone}, the members make {due}")
        self._merged = [one for one in self._merged if one.round < record.round]
        self._digests += [(record.at, fragment, mark) for fragment, mark in enumerate(record.digests)]
