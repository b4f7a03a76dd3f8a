"""The order of the samples in one pass over a dataset: a seeded bijection of range(length), computed where needed.

A lease names positions of a pass; which samples they are follows from the run's seed, so nobody stores or sends an
order, and any part of it can be had alone. Rules kept here:
- every sample has exactly one position in a pass, whatever the length;
- the order depends on (length, seed, dataset, epoch) and nothing else: not on the machine, not on a library's random
  numbers. It is fixed for ever: a change would make the leases of runs under way mean other samples.

A position is written as two digits (x, y) to the base a = ⌈√length⌉ and goes through a Feistel network, round by round

    (x, y) → (y, (x + F(y)) mod a)

which is a bijection of the a² pairs whatever F is. The few pairs that stand for no sample are sent through again until
they do: the way follows a cycle through its own start, so it ends, and no two positions meet.
"""

from __future__ import annotations

from hashlib import shake_256
from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8

WordArray = NDArray[np.uint64]


def permuted(positions: NDArray[np.int64], *, length: int, seed: int, dataset: int, epoch: int) -> NDArray[np.int64]:
    """The samples at these positions of one pass over one dataset."""
    assert length > 0 and bool(((positions >= 0) & (positions < length)).all()), "positions of another dataset"
    keys = _keys(length, seed, dataset, epoch)
    base, end = np.uint64(isqrt(length - 1) + 1), np.uint64(length)
    samples = _through(positions.ravel().astype(np.uint64), base, keys)
    while (outside := samples >= end).any():
        samples[outside] = _through(samples[outside], base, keys)
    return samples.astype(np.int64).reshape(positions.shape)


def _keys(length: int, seed: int, dataset: int, epoch: int) -> WordArray:
    """One for every round."""
    name = f"atoll permutation 1: length {length}, seed {seed}, dataset {dataset}, epoch {epoch}"
    return np.frombuffer(shake_256(name.encode()).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64)


def _through(pairs: WordArray, base: np.uint64, keys: WordArray) -> WordArray:
    x, y = pairs // base, pairs % base
    for key in keys:
        x, y = y, (x + _mixed(y + key) % base) % base
    return x * base + y


def _mixed(words: WordArray) -> WordArray:
    """Every bit of the outcome hangs on every bit that goes in (the finish of SplitMix64), modulo 2⁶⁴."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
