"""The compiled loops under this room.

Rules they keep:
- equal inputs give equal bits on every machine: no fastmath, no threads, no contraction; sums run in the order written;
- element-wise work is float32, and each loop has a plain NumPy twin in the tests that it equals bit for bit;
- norms are float64 over fixed lanes, so they depend neither on vector width nor on how the work is cut up;
- no loop allocates an array of the size of its input, and none holds the interpreter lock.

A kernel is compiled once per kind of array, and a read-only array is another kind than a writable one: callers hand
every input through `read_only`, so that there is one kind of each and `warm` has met them all.

numba takes more than a second of processor time to load, and most processes only pass by here on their way to
something else (the command line, a supervisor): it is imported by the first call of a kernel, and not before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import DoubleArray, FloatArray, HalfBits

GROUP = 8
"""Contributions that `accumulate` takes at once."""
BLOCK = 16_384
"""Elements that stay in cache while every contribution of a group is added to them."""
LANES = 64
"""Partial sums of a norm: lane j takes the elements j, j + 64, j + 128, …; the lanes are added in order at the end."""

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=np.generic)
_KERNELS: list[Kernel[..., Any]] = []


class Kernel(Generic[P, R]):
    """A loop that is compiled on first use, kept on disk, and run without the interpreter lock."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        update_wrapper(self, function)
        _KERNELS.append(self)

    @cached_property
    def compiled(self) -> Any:
        import numba

        return numba.njit(cache=True, nogil=True)(self._function)

    @property
    def _numba_type_(self) -> Any:
        """By which numba knows a kernel that another one calls."""
        import numba

        return numba.typeof(self.compiled)  # type: ignore[no-untyped-call]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.compiled(*args, **kwargs)
        return result

    @property
    def index_file(self) -> Path:
        """Where numba keeps it, unless this folder cannot be written or NUMBA_CACHE_DIR names another."""
        line, python = self._function.__code__.co_firstlineno, f"py{sys.version_info[0]}{sys.version_info[1]}"
        name = f"{Path(__file__).stem}.{self._function.__qualname__}-{line}.{python}{sys.abiflags}.nbi"
        return Path(__file__).parent / "__pycache__" / name


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    return Kernel(function)


def are_compiled() -> bool:
    """Whether all of them lie on disk, newer than their source and than numba; asked without loading numba. Where it
    cannot be told the answer is no, and `warm` finds out."""
    numba = find_spec("numba")
    if numba is None or numba.origin is None:
        return False
    newest = max(Path(__file__).stat().st_mtime, Path(numba.origin).stat().st_mtime)
    files = [kernel.index_file for kernel in _KERNELS]
    return all(file.exists() and file.stat().st_mtime >= newest for file in files)


def read_only(array: NDArray[A]) -> NDArray[A]:
    """The same memory as an input: one kind of array for the kernels, whoever made it."""
    assert array.flags.c_contiguous, "kernels work on contiguous arrays"
    view = array.view()
    view.flags.writeable = False
    return view


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
        for start in range(row * width, (row + 1) * width, LANES):
            part = values[start : min(start + LANES, (row + 1) * width)]
            for j in range(part.size):
                value = np.float64(part[j])
                lanes[j] += value * value
        total = 0.0
        for j in range(LANES):
            total += lanes[j]
        out[row] = total


@kernel
def dot(a: FloatArray, b: FloatArray) -> float:
    """Σ a b in float64, over the same lanes as a norm."""
    lanes = np.zeros(LANES, np.float64)
    for start in range(0, a.size, LANES):
        left, right = a[start : start + LANES], b[start : start + LANES]
        for j in range(left.size):
            lanes[j] += np.float64(left[j]) * np.float64(right[j])
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


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
def nearest_bf16(value: np.float32) -> np.uint32:
    """The bits of a float32, its upper half rounded to nearest even. The lower half is what is left over: drop it."""
    bits = np.float32(value).view(np.uint32)
    last = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + last))
    return rounded if value == value else np.uint32(0x7FC00000)  # rounding up a NaN could carry it over to Inf or −0


@kernel
def bf16_encode(values: FloatArray, out: HalfBits) -> None:
    for i in range(out.size):
        out[i] = np.uint16(np.uint32(nearest_bf16(values[i]) >> np.uint32(16)))


@kernel
def bf16_encode_delta(base: FloatArray, theta: FloatArray, out: HalfBits) -> None:
    """Δ = base − θ, straight to bf16."""
    for i in range(out.size):
        out[i] = np.uint16(np.uint32(nearest_bf16(np.float32(base[i] - theta[i])) >> np.uint32(16)))


@kernel
def bf16_decode(halves: HalfBits, out: NDArray[np.uint32]) -> None:
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


@kernel
def bf16_round(bits: NDArray[np.uint32]) -> None:
    """Each float32, given as its bits, to the nearest that bf16 can hold, in place."""
    for i in range(bits.size):
        bits[i] = np.uint32(nearest_bf16(np.uint32(bits[i]).view(np.float32)) & np.uint32(0xFFFF0000))


def warm() -> None:
    """Compile every kernel, or load it from disk, so that no process pays for it later or twice."""
    x, y, z = (np.ones(2, np.float32) for _ in range(3))
    given, halves, one = read_only(x), np.zeros(2, np.uint16), np.float32(1)
    accumulate(y, (given,) * GROUP, read_only(np.ones((1, GROUP), np.float32)), 2, True)
    square_norms(given, np.empty(1, np.float64))
    dot(given, given)
    sketch(given, np.zeros(2, np.float64))
    scale_rows(y, read_only(np.ones(1, np.float32)))
    nesterov(y, z, given, one, one)
    sgd(y, given, one)
    bf16_encode(given, halves)
    bf16_encode_delta(given, given, halves)
    bf16_decode(read_only(halves), y.view(np.uint32))
    bf16_round(y.view(np.uint32))
