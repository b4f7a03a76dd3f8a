"""What the tests of the lossy codecs share."""

from __future__ import annotations

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, count_values
from atoll.numerics.fragments import Rows

ROWS: tuple[Rows, ...] = (
    (),
    ((1, 1),),
    ((3, 1), (1, 2), (2, 63)),
    ((4, 64), (5, 65), (1, 1023)),
    ((1, 1_000_001),),
    ((700, 1000), (1, 5)),
)


def draw(size: int, seed: int, spread: float = 0.0) -> FloatArray:
    """Normal numbers, those of one block over `spread` powers of ten."""
    dice = np.random.default_rng(seed)
    return (dice.standard_normal(size) * 10.0 ** (spread * dice.uniform(-1, 1, size))).astype(np.float32)


def extremes() -> list[FloatArray]:
    largest, dice = 3.4028235e38, np.random.default_rng(0)
    bits = dice.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    return [
        np.zeros(65, np.float32),
        np.full(3, -0.0, np.float32),
        np.array([largest, -largest, 1.0, 0.0, 1e-45], np.float32),
        np.full(70, largest, np.float32),
        np.full(70, 1e-45, np.float32),
        np.array([1.1754944e-38, -1.1754942e-38, 1e-40], np.float32) * np.float32(7),
        np.geomspace(1e-45, largest, 300).astype(np.float32),
        bits[np.isfinite(bits)],
    ]


def encode(codec: Codec, values: FloatArray, rows: Rows) -> ByteArray:
    body = np.empty(codec.nbytes(rows), np.uint8)
    codec.encode(values, rows, body)
    return body


def round_trip(codec: Codec, values: FloatArray, rows: Rows) -> FloatArray:
    out = np.empty(count_values(rows), np.float32)
    codec.decode(encode(codec, values, rows), rows, out)
    return out
