"""How a contribution's numbers become bytes, and back. The codecs themselves are the modules of codecs/.

Rules kept here: codecs encode Δ = base − θ, never θ (bf16 of θ costs 11 % error in Δ, bf16 of Δ 0.2 %); bytes are
little-endian; Δ that is not finite is refused on the other side: fp32 and bf16 keep NaN and Inf for the screen to see,
the others mark the block. A body has exactly the length its fragment says, and nothing in it that no encoder writes, or
it is refused before anything is decoded. Equal numbers give equal bytes for any number of threads, and on a GPU
(learner/codecs.py).

With feedback, t = (base − θ) + feedback is encoded, and t − decoded is the rest: the feedback of the next time. All of
it is float32 in that order. Whoever calls decides when the rest becomes the feedback.

Merged buffers travel as bf16, whatever the codec, and their Δ is rounded towards zero, so that what is made of it lies
between base and θ: a variance stays positive. They have no feedback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from atoll.choices import CODEC
from atoll.numerics import codec_kernels
from atoll.numerics.arrays import ByteArray, FloatArray, IndexArray
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.fragments import Fragment, FragmentPlan, Rows, row_lengths
from atoll.protocol.errors import PeerError

assert sys.byteorder == "little", "arrays are sent as they lie in memory, and that is little-endian"

CHUNK = 65_536
"""Elements rounded to float16 at a time."""
BUFFERS = "bf16"


class Delta(NamedTuple):
    """t = (base − θ) + feedback, and where what a body leaves out of it goes. Every array is one whole fragment."""

    base: FloatArray
    theta: FloatArray
    feedback: FloatArray | None = None
    rest: FloatArray | None = None

    @property
    def has_feedback(self) -> bool:
        return self.feedback is not None or self.rest is not None

    def cut_out(self, values: slice) -> Delta:
        feedback, rest = (None if one is None else one[values] for one in (self.feedback, self.rest))
        return Delta(self.base[values], self.theta[values], feedback, rest)

    def as_inputs(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """For kernels: an array of length 0 stands for one that is not given."""
        nothing = self.base[:0]
        given = (self.base, self.theta, nothing if self.feedback is None else self.feedback)
        base, theta, feedback = map(read_only, given)
        rest = nothing.copy() if self.rest is None else self.rest
        assert all(one.size in (0, base.size) for one in (theta, feedback, rest)), "they are of one fragment"
        return base, theta, feedback, rest


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_feedback(self) -> bool:
        """Whether whoever sends keeps what a body leaves out, for the next one."""
        ...

    def nbytes(self, rows: Rows) -> int:
        """The bytes of these rows, exactly."""
        ...

    def encode(self, values: FloatArray, rows: Rows, out: ByteArray) -> None: ...

    def encode_delta(self, delta: Delta, rows: Rows, out: ByteArray) -> None:
        """Its `rest`, if given, is filled with what the body leaves out."""
        ...

    def check(self, data: ByteArray, rows: Rows) -> None:
        """PeerError unless this is a body of these rows."""
        ...

    def decode(self, data: ByteArray, rows: Rows, out: FloatArray) -> None:
        """Of a body that was checked. No other one makes it read or write outside of its arrays."""
        ...

    def decode_runs(self, data: ByteArray, tensor: tuple[int, int], starts: IndexArray, out: FloatArray) -> None:
        """Of one tensor, its rows and their length: as many values from each of `starts` on as fill `out`. It is called
        often, so data and starts are `read_only`."""
        ...


class BodyGroup(NamedTuple):
    """Up to GROUP bodies that are added in one pass (group_kernels.py), as kernels take them."""

    bodies: tuple[ByteArray, ...]
    """GROUP of them, `read_only`: where there are fewer the first stands for the others."""
    scales: FloatArray
    members: int
    fresh: bool
    """The first group of a sum: what `out` held does not count."""


@runtime_checkable
class AddingCodec(Codec, Protocol):
    """One whose bodies can be added up without their values in memory."""

    def add_bodies(self, group: BodyGroup, tensor: tuple[int, int], start: int, out: FloatArray) -> None:
        """out ← out + Σ c Δ over the group, in order. Of as many values of one tensor from `start` on as fill `out`."""
        ...


def make_codec(name: str, threads: int = 1) -> Codec:
    made: Codec = CODEC.load(name).make(threads)
    return made


# ---- a whole fragment -----------------------------------------------------------------------------------------------


class BodyPart(NamedTuple):
    """Parameters or buffers of a fragment: where their values and their bytes are."""

    codec: Codec
    rows: Rows
    values: slice
    data: slice
    buffers: bool


def body_nbytes(codec: Codec, part: Fragment) -> int:
    return sum(one.codec.nbytes(one.rows) for one in body_parts(codec, part))


def largest_body(codec: Codec, plan: FragmentPlan) -> int:
    """The bytes that hold a body of any fragment."""
    return max(body_nbytes(codec, part) for part in plan.fragments)


def encode_contribution(codec: Codec, part: Fragment, delta: Delta, out: ByteArray) -> None:
    """Of a whole fragment."""
    for by, rows, values, data, buffers in body_parts(codec, part):
        some = delta.cut_out(values)
        if not buffers:
            by.encode_delta(some, rows, out[data])
            continue
        moved = some.base - some.theta
        moved.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
        by.encode(moved, rows, out[data])
        if some.rest is not None:
            some.rest[:] = 0.0


def check_contribution(codec: Codec, part: Fragment, data: ByteArray) -> None:
    """PeerError: this is no body of the fragment."""
    places = list(body_parts(codec, part))
    expected = places[-1].data.stop
    if data.size != expected:
        raise PeerError(_other_length(codec, data.size, part.size, expected))
    for place in places:
        place.codec.check(data[place.data], place.rows)


def decode_contribution(codec: Codec, part: Fragment, data: ByteArray, out: FloatArray) -> None:
    """PeerError: this is no body of the fragment. Then `out` is as it was."""
    check_contribution(codec, part, data)
    for one in body_parts(codec, part):
        one.codec.decode(data[one.data], one.rows, out[one.values])


def body_parts(codec: Codec, part: Fragment) -> Iterator[BodyPart]:
    """The buffers, so that their 16-bit numbers are aligned; the parameters before them, and those after them. Most
    fragments have no buffers."""
    held, start = part.buffers, 0
    values = [held, slice(0, held.start), slice(held.stop, part.size)] if held.stop > 0 else [slice(0, part.size)]
    for one in values:
        rows = row_lengths([piece for piece, place in part.parts if one.start <= place.start < one.stop])
        by = make_codec(BUFFERS) if one is held else codec
        yield BodyPart(by, rows, one, slice(start, start + by.nbytes(rows)), one is held)
        start += by.nbytes(rows)


# ---- for the codecs -------------------------------------------------------------------------------------------------


def encode_in_steps(codec: Codec, delta: Delta, rows: Rows, out: ByteArray) -> None:
    """`Codec.encode_delta` with feedback as it is defined, for codecs that do not do it in one pass."""
    total = delta.base - delta.theta
    if delta.feedback is not None:
        total += delta.feedback
    codec.encode(total, rows, out)
    if delta.rest is not None:
        decoded = np.empty_like(total)
        codec.decode(out, rows, decoded)
        np.subtract(total, decoded, out=delta.rest)


def decode_in_parts(codec: Codec, data: ByteArray, rows: Rows, out: FloatArray, threads: int) -> None:
    """`Codec.decode` by `decode_runs`."""
    assert out.size == count_values(rows) and data.size == codec.nbytes(rows), "it was checked"
    given = read_only(data)
    runs = [(one, first) for one in tensor_places(codec, rows) for first in range(0, one.size, PART)]

    def work(begin: int, end: int) -> None:
        for one, first in runs[begin:end]:
            values = out[one.values][first : first + PART]
            codec.decode_runs(given[one.data], one.tensor, read_only(np.array([first])), values)

    in_parts(work, len(runs), 1, threads)


class TensorPlace(NamedTuple):
    """One tensor's rows and their length, and where its values and its bytes are."""

    tensor: tuple[int, int]
    values: slice
    data: slice

    @property
    def size(self) -> int:
        return self.tensor[0] * self.tensor[1]


def tensor_places(codec: Codec, rows: Rows) -> Iterator[TensorPlace]:
    value = byte = 0
    for one in rows:
        values, data = count_values((one,)), codec.nbytes((one,))
        yield TensorPlace(one, slice(value, value + values), slice(byte, byte + data))
        value, byte = value + values, byte + data


def count_values(rows: Rows) -> int:
    return sum(count * width for count, width in rows)


def check_length(codec: Codec, data: ByteArray, rows: Rows) -> None:
    expected = codec.nbytes(rows)
    if data.size != expected:
        raise PeerError(_other_length(codec, data.size, count_values(rows), expected))


def _other_length(codec: Codec, came: int, values: int, expected: int) -> str:
    return f"a body of {came} bytes came, {codec.name} of {values} values is {expected} bytes"


# ---- dtypes ---------------------------------------------------------------------------------------------------------


def round_to_dtype(values: FloatArray, dtype: str) -> None:
    """Each value, in place, to the nearest that a tensor of this dtype can hold."""
    if dtype == "bfloat16":
        codec_kernels.bf16_round(values.view(np.uint32))
    elif dtype == "float16":
        _round_to_float16(values)
    else:
        assert dtype == "float32", f"no tensor is synced as {dtype}"


def _round_to_float16(values: FloatArray) -> None:
    with np.errstate(over="ignore"):  # past 65,504 is Inf, as in the tensor itself
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            part[:] = part.astype(np.float16)
