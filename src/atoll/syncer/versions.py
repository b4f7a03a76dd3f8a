"""The versions of one fragment: the committed one, and those before it while somebody needs them.

- A committed version is never written to: the next one is made in another buffer, and a commit exchanges the two.
- A buffer that a learner reads or a cut is written from is not reused before its readers let go.
- For a merge rule that takes Δ = Θ − θ, OLD versions before the committed one are held like those that are read.
- A version is hashed once, when it is made or has arrived: whoever serves it or writes it to a cut uses that digest.
- With a lossy version codec the newest encoded steps are kept, for learners a few versions behind.
- Averaged moments lie with the version they belong to, in memory alone: they are in no cut and no payload, and a
  version that is made of those has none.
- What is called on the event loop copies and hashes nothing large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from atoll.digests import DigestInParts
from atoll.fabric.handlers import ServedFragment
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.compiled import read_only
from atoll.numerics.kernels import check_bits
from atoll.numerics.merge import Cut
from atoll.protocol.errors import PeerError

OLD = 2
"""Versions of a fragment before the committed one that slow readers may hold."""
MOST_STEPS = 32
"""Encoded steps of a fragment that are kept for learners a few versions behind: their digests go into one header."""


class AveragedMoments(NamedTuple):
    """Of the members of the round that made a version."""

    data: ByteArray
    digest: str


class CodedVersion(NamedTuple):
    """Version 0 in 2 bytes a value (numerics/initial.py)."""

    data: ByteArray
    digest: str
    """Digest of the body."""


class EncodedStep(NamedTuple):
    """What made a version of the one before it."""

    version: int
    data: ByteArray
    digest: str


class VersionBuffer:
    """One fragment's values, and how many readers hold them."""

    __slots__ = ("coded", "digest", "disconnects", "marks", "moments", "readers", "round", "values", "version")

    def __init__(self, values: FloatArray) -> None:
        self.values = values
        self.readers = 0
        self.disconnects: dict[Reader, Callable[[], None]] = {}
        """By reader, what closes its connection."""
        self.version = -1
        self.round = -1
        self.digest = ""
        self.marks = b""
        """See `Parameters.piece_marks`."""
        self.moments: AveragedMoments | None = None
        self.coded: CodedVersion | None = None


class Reader:
    """Holds a buffer's values until it is released."""

    __slots__ = ("_buffer", "_holds")

    def __init__(self, buffer: VersionBuffer) -> None:
        self._buffer, self._holds = buffer, True
        buffer.readers += 1

    def on_disconnect(self, disconnect: Callable[[], None]) -> None:
        if self._holds:
            self._buffer.disconnects[self] = disconnect

    def release(self) -> None:
        """From now on its connection may serve another request: it must not be closed because of this buffer."""
        if self._holds:
            self._holds = False
            self._buffer.readers -= 1
            self._buffer.disconnects.pop(self, None)


class FragmentVersions:
    def __init__(self, size: int) -> None:
        """`size`: elements of the fragment."""
        self._size = size
        self.committed = VersionBuffer(np.zeros(size, dtype=np.float32))
        self._spare: list[VersionBuffer] = []
        """Not committed: the next version is made in one that nobody reads."""
        self._steps: deque[EncodedStep] = deque(maxlen=MOST_STEPS)
        """The newest ones: together fewer bytes than the whole fragment."""
        self._bases: deque[tuple[VersionBuffer, Reader]] = deque()
        """The versions before the committed one, for a merge rule that needs them."""

    # ---- the next version ---------------------------------------------------------------------------------------

    def take_buffer(self) -> VersionBuffer:
        """A spare buffer that nobody reads, or a new one."""
        for buffer in self._spare:
            if buffer.readers == 0:
                self._spare.remove(buffer)
                buffer.moments = None
                return buffer
        return VersionBuffer(np.empty(self._size, dtype=np.float32))

    def return_buffer(self, buffer: VersionBuffer) -> None:
        """Nothing came of what was made in it."""
        self._spare.append(buffer)

    def commit_buffer(self, new: VersionBuffer, step: EncodedStep | None, *, keep_base: bool) -> None:
        """`step`: what made it of the version before; None: it is no step from there. `keep_base`: whether the merge
        rule needs versions before the committed one."""
        self._keep_step(step)
        self._spare.append(before := self.committed)
        before.coded = None  # a reader that is still fetching it holds its bytes
        self.committed = new
        if keep_base:
            self._bases.append((before, Reader(before)))
            self._keep_bases(OLD)
        self._disconnect_slow_readers()

    def replace_committed(self, values: FloatArray, version: int, round: int, digest: str) -> None:
        """Take over what a cut holds. Older versions are forgotten."""
        self.forget_bases()
        self.committed = buffer = VersionBuffer(values)
        buffer.version, buffer.round, buffer.digest = version, round, digest

    def _keep_step(self, step: EncodedStep | None) -> None:
        """A rollback is no step: whoever holds an older version takes the new one whole."""
        if step is None:
            self._steps.clear()
            return
        self._steps.append(step)
        while self._steps and len(self._steps) * step.data.nbytes >= 4 * self._size:
            self._steps.popleft()

    def keep_no_steps(self) -> None:
        self._steps = deque(maxlen=0)

    def _disconnect_slow_readers(self) -> None:
        """OLD versions may still be read. Readers of older ones are disconnected, and fetch a newer version."""
        still_read = sorted((one for one in self._spare if one.readers), key=lambda one: one.version)
        for buffer in still_read[:-OLD]:
            disconnects, buffer.disconnects = buffer.disconnects, {}
            for disconnect in disconnects.values():
                disconnect()

    # ---- versions that contributions were made on ---------------------------------------------------------------

    def values_by_base(self) -> dict[int, FloatArray]:
        """Of the versions before the committed one that are kept."""
        return {buffer.version: buffer.values for buffer, _ in self._bases}

    def forget_bases(self) -> None:
        self._keep_bases(0)

    def _keep_bases(self, count: int) -> None:
        """The newest ones; the others are let go."""
        while len(self._bases) > count:
            self._bases.popleft()[1].release()

    # ---- reading ------------------------------------------------------------------------------------------------

    def serve_values(self, have: int, codec: str = "") -> ServedFragment:
        """`have`: the version that the reader holds. It gets the steps from there, where they are kept, and the whole
        otherwise. `codec`: a form of version 0 that it can read."""
        buffer = self.committed
        if buffer.version < 0:
            raise PeerError("the run has no parameters yet")
        reader, data = Reader(buffer), buffer.values.view(np.uint8).data
        callbacks = (reader.release, reader.on_disconnect)
        if codec and buffer.coded is not None:
            body, digest = buffer.coded
            return ServedFragment(buffer.version, buffer.round, digest, body.data, *callbacks, codec=codec)
        steps = tuple((step.digest, step.data.data) for step in self._steps_since(have))
        return ServedFragment(buffer.version, buffer.round, buffer.digest, data, *callbacks, steps)

    def serve_moments(self, version: int) -> ServedFragment | None:
        """The averaged moments of the committed version; None: it is another one by now, or has none."""
        buffer = self.committed
        if buffer.version != version or buffer.moments is None:
            return None
        reader, (data, digest) = Reader(buffer), buffer.moments
        return ServedFragment(buffer.version, buffer.round, digest, data.data, reader.release, reader.on_disconnect)

    def _steps_since(self, have: int) -> list[EncodedStep]:
        """From that version to the committed one; none where some are not kept."""
        steps = [one for one in self._steps if one.version > have]
        return steps if steps and steps[0].version == have + 1 else []


# ---- what is checked of a new version -------------------------------------------------------------------------------


class VersionCheck:
    """Of a new version, part by part, in any order and by several threads: whether it is finite, its digest, and a
    checksum of each piece."""

    def __init__(self, values: FloatArray) -> None:
        self._values = values
        self.finite = True
        self.digest = DigestInParts(values.view(np.uint8).data)
        self._marks: list[tuple[int, np.uint32]] = []
        """By piece, of its parts."""

    def add_part(self, cut: Cut) -> None:
        finite, mark = check_bits(read_only(self._values[cut.values].view(np.uint32)))
        self.finite = self.finite and finite
        self._marks.append((cut.number, mark))
        self.digest.add_part(4 * cut.values.start, 4 * cut.values.stop)

    def piece_marks(self) -> bytes:
        marks = np.zeros(1 + max(number for number, _ in self._marks), np.uint32)
        for number, mark in self._marks:
            marks[number] ^= mark
        return marks.tobytes()


def is_finite(values: FloatArray) -> bool:
    return check_bits(read_only(values.view(np.uint32)))[0]
