"""The digest of what is large: XXH3 of 128 bits, in hex. Bodies, payloads, cuts and states carry it.

It finds accidents: a flipped bit, a short read, a wrong file. It is some 25 times as fast as BLAKE2b, so it is never
what a round waits for. It does not stop somebody who wants two contents of one digest. So what must hold against people
(the journal's chain, credentials, certificates, frozen parameters, the fragment plan) is hashed by hashlib where it is
used. docs/security.md says what each hash protects against.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

import xxhash

Buffer = bytes | bytearray | memoryview


def compute_digest(data: Buffer) -> str:
    """64 MiB take about 10 ms on one core."""
    return digest_pieces([data])


def digest_pieces(pieces: Iterable[Buffer]) -> str:
    """Of all of them, one behind the other, each hashed before the next is asked for."""
    hashed = xxhash.xxh3_128()  # its `update` frees the interpreter in every release, the one-shot function does not
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def combine_digests(digests: Sequence[str]) -> str:
    """The digest of several bodies that are one thing (of a learner's ranks, in order): of their digests. Of one body
    it is that body's."""
    return digests[0] if len(digests) == 1 else compute_digest("".join(digests).encode())


class DigestInParts:
    """Of one buffer that several threads fill, part by part: each is hashed as soon as all before it are."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._hash = data, xxhash.xxh3_128()
        self._filled: dict[int, int] = {}
        """Where parts that are not hashed yet begin, and end."""
        self._at = 0
        self._hashing = Lock()

    def add_part(self, start: int, stop: int) -> None:
        """These bytes are final. Whoever finds nobody at it hashes all that can be hashed."""
        self._filled[start] = stop
        if self._hashing.acquire(blocking=False):
            self._hash_filled()
            self._hashing.release()

    def finish(self) -> str:
        """Every part was added."""
        self._hash_filled()
        assert self._at == self._data.nbytes, "the parts are the whole"
        return self._hash.hexdigest()

    def _hash_filled(self) -> None:
        while (stop := self._filled.pop(self._at, None)) is not None:
            self._hash.update(self._data[self._at : stop])
            self._at = stop
