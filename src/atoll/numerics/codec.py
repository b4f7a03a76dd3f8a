"""How a contribution's numbers become bytes, and back.

Rules kept here: codecs encode Δ = base − θ, never θ (bf16 of θ costs 11 % error in Δ, bf16 of Δ 0.2 %); bytes are
little-endian; bf16 rounds to nearest even, and NaN and Inf stay what they are, so that the screen still sees them; Δ of
a merged buffer is rounded towards zero, so that what is made of it lies between base and θ: a variance stays positive;
a body has exactly the length its fragment says, or it is refused.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import ByteArray, FloatArray, HalfBits
from atoll.numerics.fragments import Fragment
from atoll.protocol.errors import ConfigError, PeerError

assert sys.byteorder == "little", "arrays are sent as they lie in memory, and that is little-endian"

CHUNK = 65_536
"""Elements rounded to float16 at a time."""


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    def nbytes(self, size: int) -> int:
        """The bytes of so many elements, exactly."""
        ...

    def encode(self, values: FloatArray, out: ByteArray) -> None: ...

    def encode_delta(self, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
        """Δ = base − θ, encoded in one pass."""
        ...

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        """PeerError unless `data` is exactly as long as `out` needs."""
        ...


def encode_contribution(codec: Codec, part: Fragment, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
    """Δ = base − θ of a whole fragment."""
    codec.encode_delta(base, theta, out)
    if (held := part.buffers).stop > 0:
        delta = base[held] - theta[held]
        delta.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
        codec.encode(delta, out[codec.nbytes(held.start) : codec.nbytes(held.stop)])


class Fp32(msgspec.Struct, frozen=True):
    """As it is: 4 bytes an element."""

    name: ClassVar[str] = "fp32"

    def nbytes(self, size: int) -> int:
        return 4 * size

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        np.copyto(out.view(np.float32), values)

    def encode_delta(self, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
        np.subtract(base, theta, out=out.view(np.float32))

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        _check_length(self, data, out)
        np.copyto(out.view(np.uint8), data)


class Bf16(msgspec.Struct, frozen=True):
    """The upper half of a float32, rounded to nearest even: 2 bytes an element."""

    name: ClassVar[str] = "bf16"

    def nbytes(self, size: int) -> int:
        return 2 * size

    def encode(self, values: FloatArray, out: ByteArray) -> None:
        kernels.bf16_encode(kernels.read_only(values), _halves(out, values))

    def encode_delta(self, base: FloatArray, theta: FloatArray, out: ByteArray) -> None:
        assert base.shape == theta.shape, "both are one whole fragment"
        kernels.bf16_encode_delta(kernels.read_only(base), kernels.read_only(theta), _halves(out, base))

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        _check_length(self, data, out)
        kernels.bf16_decode(kernels.read_only(data).view(np.uint16), out.view(np.uint32))


def make_codec(name: str) -> Codec:
    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16()
    raise ConfigError(f"codec {name!r} is not known: use bf16 or fp32")


def round_to_dtype(values: FloatArray, dtype: str) -> None:
    """Each value, in place, to the nearest that a tensor of this dtype can hold."""
    if dtype == "bfloat16":
        kernels.bf16_round(values.view(np.uint32))
    elif dtype == "float16":
        _round_to_float16(values)
    else:
        assert dtype == "float32", f"no tensor is synced as {dtype}"


def _round_to_float16(values: FloatArray) -> None:
    with np.errstate(over="ignore"):  # past 65,504 is Inf, as in the tensor itself
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            part[:] = part.astype(np.float16)


def _halves(out: ByteArray, values: FloatArray) -> HalfBits:
    halves = out.view(np.uint16)
    assert halves.shape == values.shape, "the buffer is as long as the codec says"
    return halves


def _check_length(codec: Codec, data: ByteArray, out: FloatArray) -> None:
    expected = codec.nbytes(out.size)
    if data.size != expected:
        raise PeerError(f"a body of {data.size} bytes came, {codec.name} of {out.size} values is {expected} bytes")
