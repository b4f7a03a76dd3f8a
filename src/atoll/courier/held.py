"""The versions that a learner holds, unrounded: what encoded steps of later versions are applied to.

With version_codec = "fp32" nothing is held: versions come whole. With a lossy one, the base in the shared memory is
what is held of a fragment whose tensors are all float32. Of any other the base is rounded to what the tensors can hold,
and Δ is taken against that; so the unrounded values lie here, in the courier's own memory: 4 bytes a parameter more.
They go with the courier, and its successor begins with whole versions.

A step is applied to the version before it and to nothing else: the digest of what comes out has to be the one that the
syncer named. Whatever is wrong, the version is fetched whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.digests import compute_digest
from atoll.mailbox.box import Mailbox
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import body_nbytes
from atoll.numerics.fragments import Fragment
from atoll.numerics.shard_plan import PartPlace
from atoll.numerics.updates import decode_update, make_version_codec


class HeldVersions:
    def __init__(self, box: Mailbox, version_codec: str) -> None:
        self._box, self._codec = box, make_version_codec(version_codec)
        self._unrounded: dict[int, FloatArray] = {}
        """Of fragments with tensors that are not float32."""
        self._versions: dict[int, int] = {}
        """Of these."""

    def version_of(self, fragment: int) -> int:
        """−1: none is held, so the fragment comes whole."""
        if self._codec is None:
            return -1
        return int(self._box.base_version[fragment]) if self._is_exact(fragment) else self._versions.get(fragment, -1)

    def step_bytes(self, part: Fragment) -> int:
        """Of a shard's part of a fragment, or of all of it; 0: versions come whole."""
        return body_nbytes(self._codec, part) if self._codec is not None else 0

    def apply_steps(
        self, place: PartPlace, have: int, steps: Sequence[memoryview], into: FloatArray, digest: str
    ) -> bool:
        """Whether `into`, which is of this part of the fragment, is now the version of that digest."""
        assert self._codec is not None
        fragment = place.part.index
        if self.version_of(fragment) != have:
            return False  # forgotten meanwhile
        held = self._box.base(fragment) if self._is_exact(fragment) else self._unrounded[fragment]
        np.copyto(into, held[place.values])
        for step in steps:
            try:
                into -= decode_update(self._codec, place.part, np.frombuffer(step, dtype=np.uint8))
            except ValueError:
                return False
        return compute_digest(into.view(np.uint8).data) == digest

    def keep(self, fragment: int, version: int, values: FloatArray) -> None:
        """A version has come, and is not rounded yet."""
        if self._codec is None or self._is_exact(fragment):
            return
        self._versions[fragment] = -1
        if fragment in self._unrounded:
            np.copyto(self._unrounded[fragment], values)
        else:
            self._unrounded[fragment] = values.copy()
        self._versions[fragment] = version

    def _is_exact(self, fragment: int) -> bool:
        """Whether the base is what came."""
        return all(piece.tensor.dtype == "float32" for piece in self._box.plan.fragments[fragment].pieces)
