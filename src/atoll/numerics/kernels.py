"""The compiled loops of norms, merges and outer steps. Those of the codecs are in codec_kernels.py.

Rules they keep:
- equal inputs give equal bits on every machine: no fastmath, no contraction; sums run in the order written;
- element-wise work is float32, and each loop has a plain NumPy twin in the tests that it equals bit for bit;
- norms are float64 over fixed lanes, so they do not depend on vector width. Such a sum is never cut up: threads share
  sums, not the values of one;
- no loop allocates an array of the size of its input, and none holds the interpreter lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.numerics import codec_kernels, compiled
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import kernel, read_only

GROUP = 8
"""Contributions that `accumulate` takes at once."""
BLOCK = 16_384
"""Elements that stay in cache while every contribution of a group is added to them."""
LANES = 64
"""Partial sums of a norm: lane j takes the elements j, j + 64, j + 128, …; the lanes are added in order at the end."""


def are_compiled() -> bool:
    """Whether all of them, the codecs' too, lie on disk. If not, `warm` compiles them."""
    return compiled.lie_compiled()


@kernel
def accumulate(
    out: FloatArray, deltas: tuple[FloatArray, ...], coefficients: FloatArray, count: int, fresh: bool
) -> None:
    """out[r] ← out[r] + Σ c[r, m] Δ_m[r] for every row r, over the first `count` m in order; `fresh` starts at 0."""
    rows = coefficients.shape[0]
    width = out.size // rows
    for row in range(rows):
        for start in range(row * width, (row + 1) * width, BLOCK):
            stop = min(start + BLOCK, (row + 1) * width)
            total = out[start:stop]
            for m in range(count):
                delta = deltas[m][start:stop]
                c = coefficients[row, m]
                if fresh and m == 0:
                    for i in range(total.size):
                        total[i] = c * delta[i]
                else:
                    for i in range(total.size):
                        total[i] += c * delta[i]


@kernel
def square_norms(values: FloatArray, out: DoubleArray) -> None:
    """out[r] ← ‖row r‖², in float64: finite exactly when every value of the row is, as no float32 squared overflows."""
    width = values.size // out.size
    lanes = np.empty(LANES, np.float64)
    for row in range(out.size):
        lanes[:] = 0.0
        stop = (row + 1) * width
        fours = stop - width % (4 * LANES)
        # Four values of a lane at a time, in their order: it is loaded and stored once for them.
        for start in range(row * width, fours, 4 * LANES):
            part = values[start : start + 4 * LANES]
            for j in range(LANES):
                a, b = np.float64(part[j]), np.float64(part[j + LANES])
                c, d = np.float64(part[j + 2 * LANES]), np.float64(part[j + 3 * LANES])
                lanes[j] = (((lanes[j] + a * a) + b * b) + c * c) + d * d
        for start in range(fours, stop, LANES):
            part = values[start : min(start + LANES, stop)]
            for j in range(part.size):
                value = np.float64(part[j])
                lanes[j] += value * value
        total = 0.0
        for j in range(LANES):
            total += lanes[j]
        out[row] = total


@kernel
def block_dots(a: FloatArray, b: FloatArray, block: int, out: DoubleArray) -> None:
    """out[k] ← Σ a b of the k-th `block` of values, in float64, over the same lanes as a norm."""
    lanes = np.empty(LANES, np.float64)
    for k in range(out.size):
        lanes[:] = 0.0
        stop = min((k + 1) * block, a.size)
        for start in range(k * block, stop, LANES):
            left, right = a[start : min(start + LANES, stop)], b[start : min(start + LANES, stop)]
            for j in range(left.size):
                lanes[j] += np.float64(left[j]) * np.float64(right[j])
        total = 0.0
        for j in range(LANES):
            total += lanes[j]
        out[k] = total


@kernel
def check_bits(bits: NDArray[np.uint32]) -> tuple[bool, np.uint32]:
    """Of float32 values, given as their bits: whether all are finite; all of them, xor."""
    mark, broken = np.uint32(0), np.uint32(0)
    for i in range(bits.size):
        mark = np.uint32(mark ^ bits[i])
        exponent = np.uint32(bits[i] & np.uint32(0x7F800000))
        broken = np.uint32(broken | np.uint32(exponent == np.uint32(0x7F800000)))
    return broken == np.uint32(0), mark


@kernel
def sketch(values: FloatArray, out: DoubleArray) -> None:
    """out[i mod B] ← Σ ± values[i], the sign of each row of B elements drawn by its number: a random projection."""
    size = out.size
    for row in range((values.size + size - 1) // size):
        mixed = np.uint64(row + 1) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        part = values[row * size : (row + 1) * size]
        if (mixed >> np.uint64(63)) == np.uint64(0):
            for j in range(part.size):
                out[j] += np.float64(part[j])
        else:
            for j in range(part.size):
                out[j] -= np.float64(part[j])


@kernel
def scale_rows(values: FloatArray, factors: FloatArray) -> None:
    """Row r ← f[r] · row r, in place."""
    width = values.size // factors.size
    for row in range(factors.size):
        part = values[row * width : (row + 1) * width]
        factor = factors[row]
        for i in range(part.size):
            part[i] *= factor


@kernel
def nesterov(theta: FloatArray, momentum: FloatArray, delta: FloatArray, lr: np.float32, mu: np.float32) -> None:
    """b ← μb + Δ;  Θ ← Θ − η(Δ + μb), in place."""
    for i in range(theta.size):
        momentum[i] = mu * momentum[i] + delta[i]
        theta[i] -= lr * (delta[i] + mu * momentum[i])


@kernel
def sgd(theta: FloatArray, delta: FloatArray, lr: np.float32) -> None:
    """Θ ← Θ − ηΔ, in place."""
    for i in range(theta.size):
        theta[i] -= lr * delta[i]


@kernel
def nesterov_update(
    momentum: FloatArray, delta: FloatArray, update: FloatArray, lr: np.float32, mu: np.float32
) -> None:
    """u ← η(Δ + μ(μb + Δ)): what `nesterov` lowers Θ by."""
    for i in range(update.size):
        update[i] = lr * (delta[i] + mu * (mu * momentum[i] + delta[i]))


@kernel
def nesterov_advance(
    momentum: FloatArray, update: FloatArray, lr_inverse: np.float32, mu: np.float32, share: np.float32
) -> None:
    """b ← μb + Δ̂, where Δ̂ = (û/η − μ²b)/(1 + μ). `lr_inverse` is 1/η, `share` 1/(1 + μ)."""
    for i in range(momentum.size):
        moved = mu * momentum[i]
        momentum[i] = moved + share * (lr_inverse * update[i] - mu * moved)


def warm() -> None:
    """Compile every kernel, or load it from disk, so that no process pays for it later or twice."""
    x, y, z = (np.ones(2, np.float32) for _ in range(3))
    given, one = read_only(x), np.float32(1)
    accumulate(y, (given,) * GROUP, read_only(np.ones((1, GROUP), np.float32)), 2, True)
    square_norms(given, np.empty(1, np.float64))
    block_dots(given, given, BLOCK, np.empty(1, np.float64))
    sketch(given, np.zeros(2, np.float64))
    check_bits(given.view(np.uint32))
    scale_rows(y, read_only(np.ones(1, np.float32)))
    nesterov(y, z, given, one, one)
    sgd(y, given, one)
    nesterov_update(given, given, y, one, one)
    nesterov_advance(z, given, one, one, one)
    codec_kernels.warm()
