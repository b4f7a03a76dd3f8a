"""int8 and int4 on the CPU, against a slow reference in float64; learner/codecs.py is compared in tests/learner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.quantised import ROWS, draw, encode, extremes, round_trip

from atoll.numerics.absmax import Absmax
from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import Delta, body_nbytes, count_values, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Rows, make_plan
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import TensorSpec, buffer_name

CODECS = [Absmax(8), Absmax(4)]
BLOCK = 64
both = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
any_rows = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 200)), max_size=4).map(tuple)


def blocks_of(rows: Rows) -> list[slice]:
    found, start = [], 0
    for count, width in rows:
        for _ in range(count):
            found += [slice(start + a, start + min(a + BLOCK, width)) for a in range(0, width, BLOCK)]
            start += width
    return found


def reference(codec: Absmax, values: FloatArray, rows: Rows) -> tuple[DoubleArray, DoubleArray]:
    """What is decoded, and the scale of each value, in float64 and without a byte."""
    levels, keep = (7, 8) if codec.bits == 4 else (127, 16)
    decoded, scales = np.zeros(values.size), np.zeros(values.size)
    for part in blocks_of(rows):
        block = values[part].astype(np.float64)
        exact = np.float64(np.float32(np.abs(block).max() / levels))
        if exact < 2.0**-126:
            continue
        unit = 2.0 ** (np.floor(np.log2(exact)) - (keep - 1))
        scale = np.floor(exact / unit) * unit
        scales[part] = scale
        decoded[part] = np.clip(np.rint(block / scale), -levels, levels) * scale
    return decoded, scales


@both
def test_by_hand(codec: Absmax) -> None:
    levels = 7.0 if codec.bits == 4 else 127.0
    values = np.array([levels, 0.5, 1.5, -2.5, -levels], np.float32)  # the scale is 1: ties go to the even code
    body = encode(codec, values, ((1, 5),))
    if codec.bits == 4:
        assert body.tolist() == [0x80, 0x3F, 0x07 | 0xE0, 0x00 | 0x90, 0x02]
    else:
        assert body.tolist() == [0x00, 0x80, 0x3F, 127, 0, 2, 256 - 2, 256 - 127]
    assert round_trip(codec, values, ((1, 5),)).tolist() == [levels, 0, 2, -2, -levels]


@both
def test_bits_a_value(codec: Absmax) -> None:
    size = 64 * 1000
    assert 8 * codec.nbytes(((10, 6400),)) / size == {8: 8.375, 4: 4.25}[codec.bits]
    assert codec.nbytes(((3, 65),)) == 3 * (codec.row_bytes(64) + codec.row_bytes(1))
    assert codec.nbytes(()) == 0


@both
@given(rows=any_rows, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0, 3, 30]))
@settings(max_examples=60, deadline=None)
def test_it_is_the_reference_within_half_a_scale(codec: Absmax, rows: Rows, seed: int, spread: int) -> None:
    values = draw(count_values(rows), seed, spread)
    decoded, scales = reference(codec, values, rows)
    found = round_trip(codec, values, rows).astype(np.float64)
    error = np.abs(found - values.astype(np.float64))
    assert (error <= scales / 2 * (1 + 2.0**-20) + (scales == 0) * 2.0**-119).all()
    near_a_tie = np.abs(error - scales / 2) <= scales * 2.0**-20
    np.testing.assert_array_equal(found[~near_a_tie], decoded[~near_a_tie])


@both
@given(rows=any_rows, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0, 36]))
@settings(max_examples=60, deadline=None)
def test_what_was_decoded_gives_the_same_bytes_again(codec: Absmax, rows: Rows, seed: int, spread: int) -> None:
    body = encode(codec, draw(count_values(rows), seed, spread), rows)
    codec.check(body, rows)
    decoded = np.empty(count_values(rows), np.float32)
    codec.decode(body, rows, decoded)
    assert encode(codec, decoded, rows).tobytes() == body.tobytes()


@both
@pytest.mark.parametrize("values", extremes(), ids=str)
def test_extremes_stay_finite(codec: Absmax, values: FloatArray) -> None:
    rows = ((1, values.size),)
    found, scales = round_trip(codec, values, rows).astype(np.float64), reference(codec, values, rows)[1]
    assert np.isfinite(found).all()
    assert (np.abs(found - values) <= scales / 2 * (1 + 2.0**-20) + (scales == 0) * 2.0**-119).all()


@both
def test_blocks_start_anew_at_every_row(codec: Absmax) -> None:
    """So the rows of a tensor that is split have the bytes they would have had."""
    values, rows = draw(5 * 100 + 3 * 7, 1), ((5, 100), (3, 7))
    split = ((2, 100), (3, 100), (1, 7), (2, 7))
    assert encode(codec, values, rows).tobytes() == encode(codec, values, split).tobytes()
    assert (
        encode(codec, values, rows)[: codec.row_bytes(100)].tobytes()
        == encode(codec, values[:100], ((1, 100),)).tobytes()
    )


@both
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_equal_bits(codec: Absmax, rows: Rows, threads: int) -> None:
    base, theta, fed = (draw(count_values(rows), seed) for seed in range(3))
    found = []
    for by in (codec, Absmax(codec.bits, threads)):
        body, rest, decoded = np.empty(by.nbytes(rows), np.uint8), np.empty_like(base), np.empty_like(base)
        by.encode_delta(Delta(base, theta, fed, rest), rows, body)
        by.decode(body, rows, decoded)
        found.append((body.tobytes(), rest.tobytes(), decoded.tobytes()))
    assert found[0] == found[1]


@both
@given(rows=any_rows, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_rest_is_what_decode_does_not_give(codec: Absmax, rows: Rows, seed: int) -> None:
    base, theta, fed = (draw(count_values(rows), seed + n) for n in range(3))
    body, rest, decoded = np.empty(codec.nbytes(rows), np.uint8), np.empty_like(base), np.empty_like(base)
    codec.encode_delta(Delta(base, theta, fed, rest), rows, body)
    codec.decode(body, rows, decoded)
    total = (base - theta) + fed
    assert body.tobytes() == encode(codec, total, rows).tobytes()
    assert rest.tobytes() == (total - decoded).tobytes()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_with_feedback_nothing_is_lost_over_many_rounds(name: str) -> None:
    """Σ decoded = Σ Δ − the last rest, within the rounding of float32."""
    codec, rows = make_codec(name), ((3, 100), (1, 7))
    size = count_values(rows)
    rest, given, taken = np.zeros(size, np.float32), np.zeros(size), np.zeros(size)
    for n in range(50):
        base, theta = draw(size, 2 * n), draw(size, 2 * n + 1)
        body, decoded = np.empty(codec.nbytes(rows), np.uint8), np.empty(size, np.float32)
        codec.encode_delta(Delta(base, theta, rest, rest), rows, body)
        codec.decode(body, rows, decoded)
        given += (base - theta).astype(np.float64)
        taken += decoded
    np.testing.assert_allclose(taken, given - rest, atol=50 * 2.0**-22 * 4)
    assert np.abs(rest).max() < 1.0, "and what is kept back stays below one step"


@both
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_marked_and_refused(codec: Absmax, broken: float) -> None:
    values, rows = draw(200, 3), ((2, 100),)
    values[170] = broken
    body, rest = np.empty(codec.nbytes(rows), np.uint8), np.empty_like(values)
    codec.encode_delta(Delta(values, np.zeros_like(values), None, rest), rows, body)
    with pytest.raises(PeerError, match=f"block 3 of tensor 0 has a scale that is not finite, .* \\({codec.name}\\)"):
        codec.check(body, rows)
    assert np.isfinite(rest).all() and not rest[164:].any(), "no feedback ever holds NaN"


def spoiled(codec: Absmax, place: int, value: int) -> ByteArray:
    body = encode(codec, draw(9, 5), ((1, 9),))
    body[place] = value
    return body


@pytest.mark.parametrize(
    ("codec", "place", "value", "words"),
    [
        (CODECS[1], 1, 0xBF, "a scale that is not finite, negative"),
        (CODECS[1], 1, 0x7F, "a scale that is not finite, negative or out of range"),
        (CODECS[1], 2, 0x81, "a code that is reserved"),
        (CODECS[1], 2, 0x18, "a code that is reserved"),
        (CODECS[1], 6, 0x11, "a code that is reserved"),
        (CODECS[0], 2, 0xC0, "a scale that is not finite, negative"),
        (CODECS[0], 2, 0x7F, "a scale that is not finite, negative or out of range"),
        (CODECS[0], 11, 0x80, "a code that is reserved"),
    ],
)
def test_what_no_encoder_writes_is_refused(codec: Absmax, place: int, value: int, words: str) -> None:
    part, out = make_plan([TensorSpec("t", (9,), "float32")], 1).fragments[0], np.full(9, 5, np.float32)
    with pytest.raises(PeerError, match=words):
        decode_contribution(codec, part, spoiled(codec, place, value), out)
    assert (out == 5).all(), "nothing changed"


@both
@given(place=st.integers(0, 267), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_fault_among_whole_blocks_is_found_in_its_block(codec: Absmax, place: int, value: int) -> None:
    """Those that lie side by side are checked together: the same is said of each in a row of its own, which has a block
    that is not whole behind it."""
    body = encode(codec, draw(256, 6), ((2, 128),))
    body[place % body.size] = value
    apart = [encode(codec, draw(1, 7), ((1, 1),)) for _ in range(4)]
    rows = np.concatenate([part for pair in zip(np.split(body, 4), apart, strict=True) for part in pair])

    def check(data: ByteArray, of: Rows) -> str:
        try:
            codec.check(data, of)
        except PeerError as refused:
            return str(refused)
        return ""

    expected = check(rows, ((4, 65),))
    for number in range(4):
        expected = expected.replace(f"block {2 * number} ", f"block {number} ")
    assert check(body, ((2, 128),)) == check(body, ((1, 256),)) == expected


@both
@pytest.mark.parametrize("extra", [-1, 1, 100])
def test_another_length_is_refused(codec: Absmax, extra: int) -> None:
    part = make_plan([TensorSpec("t", (3, 9), "float32")], 1).fragments[0]
    length = body_nbytes(codec, part)
    with pytest.raises(
        PeerError, match=f"a body of {length + extra} bytes came, {codec.name} of 27 values is {length}"
    ):
        decode_contribution(codec, part, np.zeros(length + extra, np.uint8), np.empty(27, np.float32))


@both
@given(data=st.binary(min_size=27, max_size=27))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused_or_give_finite_numbers(codec: Absmax, data: bytes) -> None:
    rows = ((3, 13),) if codec.bits == 4 else ((1, 24),)
    body, out = np.frombuffer(data, np.uint8), np.empty(count_values(rows), np.float32)
    try:
        codec.check(body, rows)
    except PeerError:
        return
    codec.decode(body, rows, out)
    assert np.isfinite(out).all()


@both
def test_buffers_travel_as_bf16_and_have_no_feedback(codec: Absmax) -> None:
    names = ["a.weight", buffer_name("mean", "norm.running_var"), "z.weight"]
    part = make_plan([TensorSpec(name, (4, 100), "float32") for name in names], 1).fragments[0]
    base, theta, fed = draw(1200, 0), draw(1200, 1), draw(1200, 2)
    body, out, rest = (
        np.empty(body_nbytes(codec, part), np.uint8),
        np.empty(1200, np.float32),
        np.ones(1200, np.float32),
    )
    encode_contribution(codec, part, Delta(base, theta, fed, rest), body)
    decode_contribution(codec, part, body, out)
    assert body.size == 2 * codec.nbytes(((4, 100),)) + 800
    cut = (base - theta).view(np.uint32) & np.uint32(0xFFFF0000)
    assert out[400:800].tobytes() == cut.view(np.float32)[400:800].tobytes() and not rest[400:800].any()
    total = (base - theta) + fed
    assert (
        rest[:400].tobytes() == (total - out)[:400].tobytes() and rest[800:].tobytes() == (total - out)[800:].tobytes()
    )
