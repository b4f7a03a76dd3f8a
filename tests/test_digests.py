"""atoll.digests: one digest for everything large, and what it finds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.digests import DigestInParts, compute_digest, digest_pieces

KIB = 1024


def test_it_is_xxh3_of_128_bits() -> None:
    assert compute_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert compute_digest(b"abc") == "06b05ab6733a618578af5f94892f3950"


# XXH3 goes other ways for up to 16, 128 and 240 bytes, for whole blocks of 1 KiB, and for what is left of one.
@pytest.mark.parametrize("size", [1, 16, 17, 128, 129, 240, 241, 1024, 1025, 5000])
def test_every_flipped_bit_is_found(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = compute_digest(data.data)
    for bit in range(8 * size):
        data[bit // 8] ^= np.uint8(1 << bit % 8)
        assert compute_digest(data.data) != before
        data[bit // 8] ^= np.uint8(1 << bit % 8)
    assert compute_digest(data.data) == before


def test_zeros_of_another_length_are_something_else() -> None:
    found = {compute_digest(bytes(size)) for size in range(3000)}
    assert len(found) == 3000


@pytest.mark.parametrize("step", [1, 7, 1000, 64 * KIB, 200 * KIB])
def test_pieces_are_the_whole(step: int) -> None:
    data = np.random.default_rng(1).bytes(100 * KIB)
    assert digest_pieces(data[at : at + step] for at in range(0, len(data), step)) == compute_digest(data)
    assert digest_pieces([]) == compute_digest(b"")


@given(st.binary(max_size=300), st.integers(1, 9), st.randoms(use_true_random=False))
def test_parts_in_any_order_give_the_digest_of_the_whole(data: bytes, step: int, dice: Random) -> None:
    found, starts = DigestInParts(memoryview(data)), list(range(0, len(data), step))
    dice.shuffle(starts)
    for start in starts:
        found.add_part(start, min(start + step, len(data)))
    assert found.finish() == compute_digest(data)
