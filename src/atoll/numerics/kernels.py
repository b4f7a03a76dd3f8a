"""The compiled loops of norms, merges and outer steps. Those of the codecs are in codec_kernels.py, sums of
contributions in group_kernels.py.

Rules they keep:
- equal inputs give equal bits on every machine: no fastmath; no contraction but of products that are exact
  (`exact_kernel`); sums run in the order written;
- element-wise work is float32, and each loop has a plain NumPy twin in the tests that it equals bit for bit;
- norms are float64 over fixed lanes, so they do not depend on vector width. Such a sum is never cut up: threads share
  sums, not the values of one;
- no loop allocates an array of the size of its input, and none holds the interpreter lock.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atoll.numerics import codec_kernels, compiled, group_kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import exact_kernel, kernel, read_only
from atoll.numerics.group_kernels import GROUP, add_group

BLOCK = 16_384
"""Elements of which one dot product is summed."""
RUN = 4096
"""Elements of a mean that stay in cache while one group of contributions after the other is added to them."""
CANCELLED = 1e-3
"""Directions whose mean is shorter than this cancel: M unrelated ones are 1/√M long, float32 noise about 1e-7."""
SPECK = 1e-30
"""A norm this small beside the mean norm has no direction: scaling it up would leave the range of float32."""
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
    a, b, c, d = deltas
    for row in range(rows):
        at, to = row * width, (row + 1) * width
        add_group(out[at:to], (a[at:to], b[at:to], c[at:to], d[at:to]), coefficients[row], count, fresh)


@exact_kernel
def square_norm(values: FloatArray, lanes: DoubleArray) -> float:
    """‖values‖², in float64: finite exactly when every value is, as no float32 squared overflows."""
    lanes[:] = 0.0
    fours = values.size - values.size % (4 * LANES)
    # Four values of a lane at a time, in their order: it is loaded and stored once for them.
    for start in range(0, fours, 4 * LANES):
        part = values[start : start + 4 * LANES]
        for j in range(LANES):
            a, b = np.float64(part[j]), np.float64(part[j + LANES])
            c, d = np.float64(part[j + 2 * LANES]), np.float64(part[j + 3 * LANES])
            lanes[j] = (((lanes[j] + a * a) + b * b) + c * c) + d * d
    for start in range(fours, values.size, LANES):
        part = values[start : min(start + LANES, values.size)]
        for j in range(part.size):
            value = np.float64(part[j])
            lanes[j] += value * value
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


@kernel
def square_norms(values: FloatArray, out: DoubleArray) -> None:
    """out[r] ← ‖row r‖²."""
    width = values.size // out.size
    lanes = np.empty(LANES, np.float64)
    for row in range(out.size):
        out[row] = square_norm(values[row * width : (row + 1) * width], lanes)


@exact_kernel
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
def weigh_directions(norms: DoubleArray, shares: DoubleArray, coefficients: DoubleArray) -> float:
    """Of ‖Δ‖ of each contribution: the mean norm Σ w‖Δ‖ / Σ w, and the coefficients of Δ in that times
    Σ w φ(Δ) / Σ w, which is about as large as a Δ."""
    radius = 0.0
    for m in range(norms.size):
        radius += shares[m] * norms[m]
    for m in range(norms.size):
        coefficients[m] = shares[m] * (radius / norms[m]) if norms[m] > SPECK * radius else 0.0
    return radius


@kernel
def add_members(out: FloatArray, deltas: FloatArray, start: int, coefficients: DoubleArray, scales: FloatArray) -> None:
    """out ← Σ c Δ over all members in order, of deltas [M, values] from `start` on. `scales`: room for a group's."""
    stop, last = start + out.size, len(deltas) - 1
    for m in range(0, len(deltas), GROUP):
        for k in range(GROUP):
            scales[k] = np.float32(coefficients[min(m + k, last)])
        b, c, d = min(m + 1, last), min(m + 2, last), min(m + 3, last)
        group = (deltas[m, start:stop], deltas[b, start:stop], deltas[c, start:stop], deltas[d, start:stop])
        add_group(out, group, scales, min(GROUP, last + 1 - m), m == 0)


@kernel
def take_mean(deltas: FloatArray, shares: DoubleArray, out: FloatArray) -> None:
    """Σ w Δ / Σ w, of deltas [M, values]."""
    scales = np.empty(GROUP, np.float32)
    for start in range(0, out.size, RUN):
        add_members(out[start : start + RUN], deltas, start, shares, scales)


@kernel
def merge_directions(deltas: FloatArray, shares: DoubleArray, out: FloatArray, rows: int) -> None:
    """Row by row, of deltas [M, values]: the mean norm in the direction of the mean direction; the mean where the
    directions cancel."""
    members, width = len(deltas), out.size // rows
    lanes, norms = np.empty(LANES, np.float64), np.empty(members, np.float64)
    coefficients, scales = np.empty(members, np.float64), np.empty(GROUP, np.float32)
    for start in range(0, rows * width, width):
        total = out[start : start + width]
        for m in range(members):
            norms[m] = math.sqrt(square_norm(deltas[m, start : start + width], lanes))
        radius = weigh_directions(norms, shares, coefficients)
        add_members(total, deltas, start, coefficients, scales)
        length = math.sqrt(square_norm(total, lanes))
        if length < CANCELLED * radius:
            add_members(total, deltas, start, shares, scales)
        elif length > 0:
            factor = np.float32(radius / length)
            for i in range(total.size):
                total[i] *= factor


@kernel
def check_bits(bits: NDArray[np.uint32]) -> tuple[bool, np.uint32]:
    """Of float32 values, given as their bits: whether all are finite; all of them, xor."""
    mark, most = np.uint32(0), np.uint32(0)
    for i in range(bits.size):
        mark = np.uint32(mark ^ bits[i])
        most = max(most, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    return bool(most < np.uint32(0x7F800000)), mark


@kernel
def sketch(values: FloatArray, out: DoubleArray, first: int) -> None:
    """out[i mod B] ← Σ ± values[i], the sign of each row of B elements drawn by its number, counted from `first`: a
    random projection."""
    size = out.size
    for row in range((values.size + size - 1) // size):
        mixed = np.uint64(first + row + 1) * np.uint64(0x9E3779B97F4A7C15)
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
def nesterov(
    theta: FloatArray, new: FloatArray, momentum: FloatArray, delta: FloatArray, lr: np.float32, mu: np.float32
) -> None:
    """b ← μb + Δ;  Θ ← Θ − η(Δ + μb). The new Θ may be in the place of Θ."""
    for i in range(new.size):
        moved = mu * momentum[i] + delta[i]
        momentum[i] = moved
        new[i] = theta[i] - lr * (delta[i] + mu * moved)


@kernel
def sgd(theta: FloatArray, new: FloatArray, delta: FloatArray, lr: np.float32) -> None:
    """Θ ← Θ − ηΔ. The new Θ may be in the place of Θ."""
    for i in range(new.size):
        new[i] = theta[i] - lr * delta[i]


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
    sketch(given, np.zeros(2, np.float64), 0)
    check_bits(given.view(np.uint32))
    scale_rows(y, read_only(np.ones(1, np.float32)))
    take_mean(read_only(np.ones((2, 2), np.float32)), read_only(np.ones(2)), y)
    merge_directions(read_only(np.ones((2, 2), np.float32)), read_only(np.ones(2)), y, 1)
    weigh_directions(np.ones(2), read_only(np.ones(2)), np.empty(2))
    nesterov(given, y, z, given, one, one)
    sgd(given, y, given, one)
    nesterov_update(given, given, y, one, one)
    nesterov_advance(z, given, one, one, one)
    codec_kernels.warm()
    group_kernels.warm()
