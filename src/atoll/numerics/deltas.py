"""Contributions as a merge, a screen and a filter read them: some runs of values of a piece at a time.

What came encoded stays so until its round is merged. Whoever reads decodes into memory of its own that stays in cache:
no decoded contribution is written to memory and read again (docs/adr/0036); a mean adds bodies up without that memory
(`sum_bodies`). What has to be there whole (a filter that
compares all values, sums of relays) is read whole, by `read_whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray, IndexArray
from atoll.numerics.codec import AddingCodec, BodyGroup, Codec, body_parts, tensor_places
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.fragments import Fragment, Piece
from atoll.numerics.group_kernels import GROUP


class ReadableDelta(Protocol):
    """Equal runs give equal bits, however they are cut."""

    @property
    def fragment(self) -> Fragment: ...

    def read_runs(self, number: int, starts: IndexArray, out: FloatArray) -> None:
        """Of the piece of this number: as many values from each of `starts` (read-only) on as fill `out`."""
        ...


GivenDelta = FloatArray | ReadableDelta


class DecodedDelta(NamedTuple):
    fragment: Fragment
    values: FloatArray

    def read_runs(self, number: int, starts: IndexArray, out: FloatArray) -> None:
        size, first = out.size // starts.size, self.fragment.offsets[number]
        for k, start in enumerate(starts):
            out[k * size : (k + 1) * size] = self.values[first + start : first + start + size]


class PieceBody(NamedTuple):
    """What came for one piece."""

    codec: Codec
    tensor: tuple[int, int]
    """Its rows and their length."""
    data: ByteArray


class EncodedDelta:
    def __init__(self, codec: Codec, fragment: Fragment, data: ByteArray) -> None:
        """`data`: a body that was checked."""
        self.fragment = fragment
        self._bodies: dict[int, PieceBody] = {}
        """By the piece's first value."""
        for part in body_parts(codec, fragment):
            for place in tensor_places(part.codec, part.rows):
                body = PieceBody(part.codec, place.tensor, read_only(data[part.data][place.data]))
                self._bodies[part.values.start + place.values.start] = body

    def read_runs(self, number: int, starts: IndexArray, out: FloatArray) -> None:
        codec, tensor, data = self.piece_body(number)
        codec.decode_runs(data, tensor, starts, out)

    def piece_body(self, number: int) -> PieceBody:
        return self._bodies[self.fragment.offsets[number]]


class ChangedDelta(NamedTuple):
    """Another one, but for what is done to each run that is read."""

    given: ReadableDelta
    change: Callable[[Piece, slice, FloatArray], None]
    """Of values of a piece, where in the fragment they lie and they themselves, to be changed in place."""

    @property
    def fragment(self) -> Fragment:
        return self.given.fragment

    def read_runs(self, number: int, starts: IndexArray, out: FloatArray) -> None:
        self.given.read_runs(number, starts, out)
        size, first = out.size // starts.size, self.fragment.offsets[number]
        for k, start in enumerate(starts):
            at = slice(first + int(start), first + int(start) + size)
            self.change(self.fragment.pieces[number], at, out[k * size : (k + 1) * size])


def as_readable(fragment: Fragment, given: GivenDelta) -> ReadableDelta:
    if isinstance(given, np.ndarray):
        assert given.shape == (fragment.size,), "every array is one whole fragment"
        return DecodedDelta(fragment, given)
    assert given.fragment.size == fragment.size, "all contributions are to one fragment"
    return given


def read_whole(delta: ReadableDelta, threads: int = 1) -> FloatArray:
    """All its values, in an array; that of a decoded one itself."""
    if isinstance(delta, DecodedDelta):
        return delta.values
    out = np.empty(delta.fragment.size, np.float32)
    runs = [
        (number, first, at)
        for number, (_, at) in enumerate(delta.fragment.parts)
        for first in range(0, at.stop - at.start, PART)
    ]

    def work(begin: int, end: int) -> None:
        for number, first, at in runs[begin:end]:
            delta.read_runs(number, read_only(np.array([first])), out[at][first : first + PART])

    in_parts(work, len(runs), 1, threads)
    return out


# ---- sums straight from bodies --------------------------------------------------------------------------------------


class BodySum(NamedTuple):
    """Σ c Δ of one piece, of bodies of one codec: the bits of `take_mean` of what they decode to."""

    codec: AddingCodec
    tensor: tuple[int, int]
    groups: list[BodyGroup]

    def add_values(self, start: int, out: FloatArray) -> None:
        """As many of its values from `start` on as fill `out`."""
        for group in self.groups:
            self.codec.add_bodies(group, self.tensor, start, out)


def sum_bodies(deltas: Sequence[ReadableDelta], number: int, coefficients: DoubleArray) -> BodySum | None:
    """Of the piece of this number. None: not all came encoded, or not by one codec, or it cannot add bodies."""
    bodies = [delta.piece_body(number) for delta in deltas if isinstance(delta, EncodedDelta)]
    if len(bodies) < len(deltas) or len({one.codec.name for one in bodies}) != 1:
        return None
    codec, tensor, _ = bodies[0]
    if not isinstance(codec, AddingCodec):
        return None
    groups = []
    for first in range(0, len(bodies), GROUP):
        data = [one.data for one in bodies[first : first + GROUP]]
        scales = np.zeros(GROUP, np.float32)
        scales[: len(data)] = coefficients[first : first + GROUP]
        filled = (*data, *([data[0]] * (GROUP - len(data))))
        groups.append(BodyGroup(filled, read_only(scales), len(data), fresh=first == 0))
    return BodySum(codec, tensor, groups)
