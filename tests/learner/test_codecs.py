"""The codecs on a device give the bytes, the numbers and the rest of those on the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.quantised import ROWS, draw, extremes

from atoll.learner import codecs
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Codec, Delta, count_values, make_codec
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import Rows

CODECS = [*(make_codec(name) for name in ("fp32", "bf16", "int8", "int4")), TopK()]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
any_rows = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 200)), max_size=4).map(tuple)
each = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
everywhere = pytest.mark.parametrize("device", DEVICES)


def bits_of(values: FloatArray) -> bytes:
    """Every NaN alike: which one an operation gives is the processor's choice."""
    return np.where(np.isnan(values), np.float32(np.nan), values).tobytes()


def compare(codec: Codec, values: FloatArray, rows: Rows, device: str) -> None:
    size, length = count_values(rows), codec.nbytes(rows)
    body, rest, decoded = np.empty(length, np.uint8), np.empty(size, np.float32), np.empty(size, np.float32)
    codec.encode_delta(Delta(values, np.zeros_like(values), None, rest), rows, body)
    codec.decode(body, rows, decoded)
    total = torch.from_numpy(values - np.zeros_like(values)).to(device)
    there, left = torch.empty(length, dtype=torch.uint8, device=device), torch.empty(size, device=device)
    codecs.encode(codec, total, rows, there, left)
    assert there.cpu().numpy().tobytes() == body.tobytes()
    assert bits_of(left.cpu().numpy()) == bits_of(rest)
    codecs.decode(codec, there, rows, left)
    assert bits_of(left.cpu().numpy()) == bits_of(decoded)


@each
@everywhere
@given(rows=any_rows, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0, 3, 40]))
@settings(max_examples=40, deadline=None)
def test_equal_bits(codec: Codec, device: str, rows: Rows, seed: int, spread: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        compare(codec, draw(count_values(rows), seed, spread), rows, device)


@each
@everywhere
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_equal_bits_of_every_shape(codec: Codec, device: str, rows: Rows) -> None:
    compare(codec, draw(count_values(rows), 1), rows, device)


@everywhere
def test_of_equal_values_both_keep_the_first(device: str) -> None:
    values = np.tile(np.array([2, -3, 3, 1], np.float32), 1000)
    compare(TopK(), values, ((4, 1000),), device)


@each
@everywhere
@pytest.mark.parametrize("values", extremes(), ids=lambda values: f"{values[0]:.3g}, …")
def test_equal_bits_of_extremes(codec: Codec, device: str, values: FloatArray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        compare(codec, values, ((1, values.size),), device)
        if codec.name not in ("fp32", "bf16"):
            values = values.copy()
            values[-1] = np.nan
            compare(codec, values, ((1, values.size),), device)


@each
@everywhere
@pytest.mark.parametrize("chunk", [1, 200, 3000])
def test_equal_bits_however_many_blocks_are_worked_on_at_a_time(
    monkeypatch: pytest.MonkeyPatch, codec: Codec, device: str, chunk: int
) -> None:
    monkeypatch.setattr(codecs, "CHUNK", chunk)
    rows = ((7, 200), (1, 2500), (3, 64))
    compare(codec, draw(count_values(rows), 2), rows, device)
