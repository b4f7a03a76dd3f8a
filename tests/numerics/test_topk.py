"""Top-k on the CPU, against a slow reference; learner/codecs.py is compared in tests/learner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.quantised import ROWS, draw, encode, extremes, round_trip

from atoll.choices import CODEC
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Delta, count_values, decode_contribution, make_codec
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import Rows, make_plan
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import TensorSpec

BLOCK, TOPK = 1024, TopK()
any_rows = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 900)), max_size=3).map(tuple)


def blocks_of(rows: Rows) -> list[slice]:
    found, start = [], 0
    for size in [count * width for count, width in rows]:
        found += [slice(start + a, start + min(a + BLOCK, size)) for a in range(0, size, BLOCK)]
        start += size
    return found


def kept_of(block: FloatArray) -> list[int]:
    by_size = sorted(range(block.size), key=lambda i: (-abs(float(block[i])), i))
    return sorted(by_size[: -(-9 * block.size // 100)])


def test_by_hand() -> None:
    values = np.zeros(20, np.float32)
    values[[3, 9, 15]] = [31.0, -31.0, 2.5]  # two of 20 are kept
    body = encode(TOPK, values, ((2, 10),))
    assert body.tolist() == [0x80, 0x3F, (3 << 6 | 31) & 255, 3 << 6 >> 8, (9 << 6 | 33) & 255, 9 << 6 >> 8]
    assert round_trip(TOPK, values, ((2, 10),)).tolist() == [*[0] * 3, 31, *[0] * 5, -31, *[0] * 10]


def test_a_bit_and_a_half_a_value() -> None:
    assert 8 * TOPK.nbytes(((1000, 1024),)) / 1_024_000 == 1.46875
    assert TOPK.nbytes(((1, 1),)) == 4 and TOPK.nbytes(()) == 0


def test_its_sender_keeps_the_rest() -> None:
    assert TOPK.name in CODEC.names() and make_codec(TOPK.name).needs_feedback


@given(rows=any_rows, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0, 2, 30]))
@settings(max_examples=40, deadline=None)
def test_the_largest_of_every_block_within_half_a_scale(rows: Rows, seed: int, spread: int) -> None:
    values = draw(count_values(rows), seed, spread)
    decoded = round_trip(TOPK, values, rows)
    for part in blocks_of(rows):
        block, found = values[part], decoded[part]
        kept = kept_of(block)
        assert set(np.flatnonzero(found)) <= set(kept)
        scale = float(np.abs(block).max()) / 31
        assert (np.abs(found[kept] - block[kept].astype(np.float64)) <= scale / 2 * (1 + 2.0**-20) + 2.0**-121).all()


def test_of_equal_values_the_first_are_kept() -> None:
    values = np.tile(np.array([1, -1], np.float32), 600)
    assert np.flatnonzero(round_trip(TOPK, values, ((1, 1200),))).tolist() == [*range(93), *range(1024, 1040)]


@given(rows=any_rows, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_what_was_decoded_is_decoded_again(rows: Rows, seed: int) -> None:
    once = round_trip(TOPK, draw(count_values(rows), seed, 1), rows)
    assert (round_trip(TOPK, once, rows) == once).all()


@pytest.mark.parametrize("values", extremes(), ids=str)
def test_extremes_stay_finite(values: FloatArray) -> None:
    assert np.isfinite(round_trip(TOPK, values, ((1, values.size),))).all()


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("threads", [2, 7])
def test_any_number_of_threads_gives_equal_bits(rows: Rows, threads: int) -> None:
    base, theta, fed = (draw(count_values(rows), seed) for seed in range(3))
    found = []
    for by in (TOPK, TopK(threads)):
        body, rest, decoded = np.empty(by.nbytes(rows), np.uint8), np.empty_like(base), np.empty_like(base)
        by.encode_delta(Delta(base, theta, fed, rest), rows, body)
        by.check(body, rows)
        by.decode(body, rows, decoded)
        assert rest.tobytes() == (((base - theta) + fed) - decoded).tobytes()
        found.append((body.tobytes(), rest.tobytes(), decoded.tobytes()))
    assert found[0] == found[1]


def test_with_feedback_nothing_is_lost_over_many_rounds() -> None:
    rows, size = ((3, 500),), 1500
    rest, given, taken = np.zeros(size, np.float32), np.zeros(size), np.zeros(size)
    for n in range(200):
        delta, decoded = draw(size, n), np.empty(size, np.float32)
        body = np.empty(TOPK.nbytes(rows), np.uint8)
        TOPK.encode_delta(Delta(delta, np.zeros_like(delta), rest, rest), rows, body)
        TOPK.decode(body, rows, decoded)
        given, taken = given + delta, taken + decoded
    np.testing.assert_allclose(taken, given - rest, atol=200 * 2.0**-22 * 32)
    assert np.abs(taken).max() > 5, "in time everything is sent"


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_marked_and_refused(broken: float) -> None:
    values, rows = draw(3000, 3), ((3, 1000),)
    values[1500] = broken
    body, rest = np.empty(TOPK.nbytes(rows), np.uint8), np.empty_like(values)
    TOPK.encode_delta(Delta(values, np.zeros_like(values), None, rest), rows, body)
    with pytest.raises(PeerError, match=r"block 1 of tensor 0 has a scale that is not finite, .* \(topk\)"):
        TOPK.check(body, rows)
    assert np.isfinite(rest).all()


def spoiled(place: int, *values: int) -> ByteArray:
    body = encode(TOPK, np.arange(100, dtype=np.float32), ((1, 100),))  # keeps 91 to 99
    body[place : place + len(values)] = values
    return body


@pytest.mark.parametrize(
    ("place", "values", "words"),
    [
        (1, (0xFF,), "a scale that is not finite, negative or out of range"),
        (1, (0x7F,), "a scale that is not finite, negative or out of range"),
        (14, (97 << 6 & 255 | 32, 97 << 6 >> 8), "a code that is reserved"),
        (18, (100 << 6 & 255, 100 << 6 >> 8), "an offset that is past its end or does not ascend"),
        (18, (98 << 6 & 255, 98 << 6 >> 8), "an offset that is past its end or does not ascend"),
        (2, (255, 255), "an offset that is past its end or does not ascend"),
    ],
)
def test_what_no_encoder_writes_is_refused(place: int, values: tuple[int, ...], words: str) -> None:
    part, out = make_plan([TensorSpec("t", (100,), "float32")], 1).fragments[0], np.full(100, 5, np.float32)
    with pytest.raises(PeerError, match=words):
        decode_contribution(TOPK, part, spoiled(place, *values), out)
    assert (out == 5).all(), "nothing changed"


@pytest.mark.parametrize("extra", [-1, 1, 100])
def test_another_length_is_refused(extra: int) -> None:
    with pytest.raises(PeerError, match=f"a body of {20 + extra} bytes came, topk of 100 values is 20 bytes"):
        TOPK.check(np.zeros(20 + extra, np.uint8), ((1, 100),))


@given(data=st.binary(min_size=26, max_size=26))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused_or_give_finite_numbers_inside(data: bytes) -> None:
    body, around = np.frombuffer(data, np.uint8), np.full(2000, 7, np.float32)
    TOPK.decode(body, ((1, 130),), around[:130])
    assert (around[130:] == 7).all(), "not even unchecked bytes are written outside"
    try:
        TOPK.check(body, ((1, 130),))
    except PeerError:
        return
    assert np.isfinite(around).all()
