from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, Delta, decode_contribution, make_codec, round_to_dtype
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.messages import TensorSpec

CODECS = [make_codec("fp32"), make_codec("bf16")]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, -1e-40, 1.1754944e-38], np.float32)

any_bits = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200).map(
    lambda b: np.array(b, np.uint32).view(np.float32)
)


def encoded(codec: Codec, values: FloatArray) -> ByteArray:
    rows = ((1, values.size),)
    out = np.empty(codec.nbytes(rows), np.uint8)
    codec.encode(values, rows, out)
    return out


def round_trip(codec: Codec, values: FloatArray) -> FloatArray:
    out = np.empty(values.size, np.float32)
    codec.decode(encoded(codec, values), ((1, values.size),), out)
    return out


def bf16_by_search(value: float) -> float:
    """The nearest of the two neighbours that 16 bits can hold, the even one on a tie."""
    below = int(np.float32(abs(value)).view(np.uint32)) >> 16
    lower, upper = (float(np.uint32(half << 16).view(np.float32)) for half in (below, below + 1))
    near = [abs(value) - lower, upper - abs(value)]
    up = near[1] < near[0] or (near[0] == near[1] and below % 2 == 1)
    return float(np.copysign(upper if up else lower, value))


def test_bf16_by_hand() -> None:
    one = np.array([1.0, -2.0, 1.00390625, 1.01171875, 3.140625], np.float32)  # two ties: down to even, up to even
    assert encoded(CODECS[1], one).view(np.uint16).tolist() == [0x3F80, 0xC000, 0x3F80, 0x3F82, 0x4049]
    assert encoded(CODECS[1], one[:1]).tolist() == [0x80, 0x3F], "the low byte comes first"
    assert encoded(CODECS[0], one[:1]).tolist() == [0, 0, 0x80, 0x3F]


@given(any_bits)
def test_fp32_keeps_every_bit(values: FloatArray) -> None:
    assert round_trip(CODECS[0], values).tobytes() == values.tobytes()


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_bf16_is_the_nearest(drawn: list[float]) -> None:
    values = np.array(drawn, np.float32)
    assert round_trip(CODECS[1], values).tolist() == [bf16_by_search(float(value)) for value in values]


@given(any_bits)
def test_bf16_errs_by_at_most_one_part_in_256(values: FloatArray) -> None:
    normal = values[np.isfinite(values) & (np.abs(values) >= 1.2e-38) & (np.abs(values) < 3.38e38)].astype(np.float64)
    back = round_trip(CODECS[1], normal.astype(np.float32)).astype(np.float64)
    assert (np.abs(back - normal) <= np.abs(normal) * 2.0**-8).all()


@given(any_bits)
def test_nan_stays_nan_and_inf_stays_inf(values: FloatArray) -> None:
    back = round_trip(CODECS[1], values)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(values))
    np.testing.assert_array_equal(back[np.isinf(values)], values[np.isinf(values)])


def test_every_pattern_of_a_nan_stays_one() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32)
    assert np.isnan(round_trip(CODECS[1], bits.view(np.float32))).all()


def test_bf16_is_torchs_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(65_536, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    values = np.concatenate([values[~np.isnan(values)], SPECIAL])
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert encoded(CODECS[1], values).tobytes() == theirs.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_what_a_tensor_holds(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(1).integers(0, 2**32, 150_000, dtype=np.uint32).view(np.float32)
    small = np.random.default_rng(2).standard_normal(50_000).astype(np.float32)
    values = np.concatenate([bits[~np.isnan(bits)], small, SPECIAL, np.array([65_519, 65_520], np.float32)])
    theirs = torch.from_numpy(values.copy()).to(getattr(torch, dtype)).float().numpy()
    round_to_dtype(values, dtype)
    assert values.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_keeps_nan(dtype: str) -> None:
    values = np.array([np.nan, 1], np.float32)
    round_to_dtype(values, dtype)
    assert np.isnan(values[0]) and values[1] == 1


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("size", [1, 3, 1000, 70_001])
def test_encode_delta_is_encode_of_the_difference(codec: Codec, size: int) -> None:
    rng = np.random.default_rng(size)
    base, theta = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    out = np.empty(codec.nbytes(((1, size),)), np.uint8)
    codec.encode_delta(Delta(base, theta), ((1, size),), out)
    assert out.tobytes() == encoded(codec, base - theta).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_bodies_may_be_read_only_and_lie_anywhere(codec: Codec) -> None:
    values = np.array([1.0, -0.5, 4.0], np.float32)
    body = np.frombuffer(b"x" + encoded(codec, values).tobytes(), np.uint8)[1:]
    out = np.empty(3, np.float32)
    codec.decode(body, ((1, 3),), out)
    assert out.tolist() == values.tolist()


@pytest.mark.parametrize("extra", [-1, 1, 100])
def test_another_length_is_refused_and_named(extra: int) -> None:
    part, out = make_plan([TensorSpec("t", (2, 2), "float32")], 1).fragments[0], np.ones(4, np.float32)
    for codec, length in zip(CODECS, (16, 8), strict=True):
        words = f"a body of {length + extra} bytes came, {codec.name} of 4 values is {length} bytes"
        with pytest.raises(PeerError, match=words):
            decode_contribution(codec, part, np.zeros(length + extra, np.uint8), out)
        with pytest.raises(PeerError, match=words):
            codec.check(np.zeros(length + extra, np.uint8), ((2, 2),))
    assert out.tolist() == [1, 1, 1, 1]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="codec = 'nonsense' is not known: use one of bf16, "):
        make_codec("nonsense")
