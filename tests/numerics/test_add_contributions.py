"""Decoding and adding in one pass gives the bits of decoding first."""

from __future__ import annotations

import numpy as np
import pytest
from tests.numerics.quantised import draw

from atoll.numerics.codec import (
    Codec,
    Delta,
    add_contributions,
    body_nbytes,
    decode_contribution,
    encode_contribution,
    make_codec,
)
from atoll.numerics.codecs.topk import TopK
from atoll.numerics.fragments import make_plan
from atoll.numerics.kernels import read_only
from atoll.numerics.merge import add_scaled
from atoll.protocol.messages import TensorSpec, buffer_name

PART = make_plan(
    [
        TensorSpec("a.weight", (700, 1000), "float32"),
        TensorSpec("b.weight", (5, 65), "float32"),
        TensorSpec(buffer_name("mean", "norm.running_var"), (7,), "float32"),
        TensorSpec("z.bias", (3,), "float32"),
    ],
    1,
).fragments[0]
CODECS = [*(make_codec(name, threads) for threads in (1, 3) for name in ("fp32", "bf16", "int8", "int4")), TopK(2)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}-{codec.threads}")
@pytest.mark.parametrize("members", [1, 4, 11])
def test_equal_bits(codec: Codec, members: int) -> None:
    nothing, bodies, deltas = np.zeros(PART.size, np.float32), [], []
    for m in range(members):
        body, delta = np.empty(body_nbytes(codec, PART), np.uint8), np.empty(PART.size, np.float32)
        encode_contribution(codec, PART, Delta(draw(PART.size, m), nothing), body)
        decode_contribution(codec, PART, body, delta)
        bodies.append(body)
        deltas.append(read_only(delta))
    coefficients = np.random.default_rng(9).uniform(0, 1, (members, len(PART.pieces)))
    out, expected = np.full(PART.size, np.nan, np.float32), np.empty(PART.size, np.float32)
    for n, (_, values) in enumerate(PART.parts):
        add_scaled([delta[values] for delta in deltas], coefficients[:, n : n + 1], expected[values])
    add_contributions(codec, PART, bodies, coefficients, out)
    assert out.tobytes() == expected.tobytes()
