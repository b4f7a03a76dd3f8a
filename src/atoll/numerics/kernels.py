"""The compiled loops under this room.

Rules they keep:
- equal inputs give equal bits on every machine: no fastmath, no contraction; sums run in the order written;
- a loop has no threads of its own. `in_parts` runs one over parts that do not share a value: any number of threads, or
  other parts, give equal bits;
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
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray, HalfBits

GROUP = 8
"""Contributions that `accumulate` takes at once."""
BLOCK = 16_384
"""Elements that stay in cache while every contribution of a group is added to them."""
LANES = 64
"""Partial sums of a norm: lane j takes the elements j, j + 64, j + 128, …; the lanes are added in order at the end."""
PART = 1 << 18
"""Values that one thread works on at a time."""
ABSMAX_BLOCK = 64
"""Values with one scale: 128 would save 3 % of the bytes and err by 9 % (Gaussian) to 20 % (heavy tails) more."""
CACHED_BLOCKS = 64
"""Blocks that are decoded before they are added, while they are in cache."""
TOPK_BLOCK = 1024
"""Values of which a few are kept: an offset in it has 10 bits, and with a code of 6 bits it fills 2 bytes."""
TOPK_PERCENT = 9
"""As many as a twentieth of the bytes of float32 allows: the fewer are sent, the later the others come."""

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


def in_parts(work: Callable[[int, int], None], count: int, step: int, threads: int) -> None:
    """`work(first, last)` over `count` units of work, `step` at a time."""
    parts = [(first, min(first + step, count)) for first in range(0, count, step)]
    if threads <= 1 or len(parts) <= 1:
        if count:
            work(0, count)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        for done in [pool.submit(work, *part) for part in parts]:
            done.result()


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


# ---- int8 and int4 ------------------------------------------------------------------------------------------------


@kernel
def float_of(bits: int | np.integer[Any]) -> np.float32:
    return np.uint32(bits).view(np.float32)


@kernel
def bits_of(value: np.float32) -> np.uint32:
    return np.float32(value).view(np.uint32)


@kernel
def absmax_scale(most: int | np.integer[Any], bits: int) -> np.uint32:
    """The bits of a block's scale, for the bits of its largest |value|.

    absmax / 127 or / 7, cut off to 16 (int8) or 8 (int4) significant bits, so that a code times its scale is exact.
    Codes of 6 bits are those of top-k: absmax / 31, 8 bits.
    A scale below the smallest normal number is 0: such a block is sent as zeros. NaN where a value is not finite.
    """
    if most >= 0x7F800000:
        return np.uint32(0x7FC00000)
    scale = bits_of(float_of(most) / np.float32((1 << (bits - 1)) - 1))
    cut = np.uint32(scale & np.uint32(0xFFFFFF00 if bits == 8 else 0xFFFF0000))
    return cut if cut >= np.uint32(0x00800000) else np.uint32(0)


@kernel
def absmax_encode(
    base: FloatArray,
    theta: FloatArray,
    feedback: FloatArray,
    rest: FloatArray,
    out: ByteArray,
    width: int,
    row_bytes: int,
    bits: int,
    first: int,
    last: int,
) -> None:
    """Blocks `first` to `last` of t = (base − θ) + feedback, in rows of `width` values; rest ← t − decoded.

    θ, feedback and rest may be empty: then they are left out. A block that is not finite leaves no rest.
    """
    levels, head = np.float32(7 if bits == 4 else 127), 2 if bits == 4 else 3
    per_row, full = -(-width // ABSMAX_BLOCK), head + ABSMAX_BLOCK * bits // 8
    values, codes = np.empty(ABSMAX_BLOCK, np.float32), np.zeros(ABSMAX_BLOCK + 1, np.int8)
    words = values.view(np.int32)
    for number in range(first, last):
        row = number // per_row
        place = number - row * per_row
        start = row * width + place * ABSMAX_BLOCK
        count = min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)
        values[:count] = base[start : start + count]
        if theta.size:
            part = theta[start : start + count]
            for i in range(count):
                values[i] -= part[i]
        if feedback.size:
            part = feedback[start : start + count]
            for i in range(count):
                values[i] += part[i]
        most = np.int32(0)
        for i in range(count):
            most = max(most, np.int32(words[i] & np.int32(0x7FFFFFFF)))
        scale = absmax_scale(most, bits)
        body = out[row * row_bytes + place * full :]
        for k in range(head):
            body[k] = np.uint8((scale >> np.uint32(8 * (4 - head + k))) & np.uint32(255))
        if np.uint32(0) < scale < np.uint32(0x7F800000):
            inverse = np.float32(1) / float_of(scale)
            for i in range(count):
                codes[i] = np.int8(min(max(np.rint(values[i] * inverse), -levels), levels))
        else:
            codes[:count] = 0
            if scale:
                values[:count] = 0
                scale = np.uint32(0)
        if rest.size:
            left, s = rest[start : start + count], float_of(scale)
            for i in range(count):
                left[i] = values[i] - np.float32(codes[i]) * s
        packed = body[head:]
        if bits == 8:
            for i in range(count):
                packed[i] = np.uint8(codes[i])
        else:
            half = (count + 1) // 2
            codes[count] = 0
            for i in range(half):
                packed[i] = np.uint8((codes[i] & 15) | ((codes[i + half] & 15) << 4))


@kernel
def absmax_scale_at(data: ByteArray, at: int, bits: int) -> np.uint32:
    """The bits of the scale that is stored there: its upper 24 (int8) or 16, low byte first."""
    if bits != 8:
        return np.uint32(np.uint32(data[at]) << np.uint32(16) | np.uint32(data[at + 1]) << np.uint32(24))
    return np.uint32(
        np.uint32(data[at]) << np.uint32(8)
        | np.uint32(data[at + 1]) << np.uint32(16)
        | np.uint32(data[at + 2]) << np.uint32(24)
    )


@kernel
def absmax_check(data: ByteArray, width: int, row_bytes: int, bits: int, first: int, last: int) -> int:
    """−1, or the first block at fault times 2, plus 0 for its scale and 1 for its codes."""
    head = 2 if bits == 4 else 3
    per_row, full = -(-width // ABSMAX_BLOCK), head + ABSMAX_BLOCK * bits // 8
    highest = bits_of(np.float32(3.4028235e38) / np.float32(7 if bits == 4 else 127))
    others = np.uint8(0x77 if bits == 4 else 0x7F)
    for number in range(first, last):
        row = number // per_row
        place = number - row * per_row
        count = min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)
        at = row * row_bytes + place * full
        scale = absmax_scale_at(data, at, bits)
        if scale != 0 and not np.uint32(0x00800000) <= scale <= highest:
            return 2 * number
        packed = data[at + head : at + head + (count * bits + 7) // 8]
        # The sign of each code without any other bit. Adding the mask sets a sign's bit where another bit is set.
        wrong = np.uint8(0)
        for i in range(packed.size):
            wrong = np.uint8(wrong | (packed[i] & ~np.uint8((packed[i] & others) + others) & ~others))
        if wrong or (bits == 4 and count % 2 == 1 and packed[-1] >> 4 != 0):
            return 2 * number + 1
    return -1


@kernel
def absmax_decode(
    data: ByteArray, out: FloatArray, origin: int, width: int, row_bytes: int, bits: int, first: int, last: int
) -> None:
    """Blocks `first` to `last` of a checked body: code times scale, which is exact. `origin`: where `out` begins."""
    head = 2 if bits == 4 else 3
    per_row, full = -(-width // ABSMAX_BLOCK), head + ABSMAX_BLOCK * bits // 8
    for number in range(first, last):
        row = number // per_row
        place = number - row * per_row
        start = row * width + place * ABSMAX_BLOCK - origin
        count = min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)
        at = row * row_bytes + place * full
        scale = float_of(absmax_scale_at(data, at, bits))
        # Named `block` instead of `part` it is half as fast: the compiler takes variables in the order of their names.
        part, codes = out[start : start + count], data[at + head :]
        if bits == 8:
            for i in range(count):
                part[i] = np.float32(np.int8(codes[i])) * scale
        else:
            half = (count + 1) // 2
            low, high = part[:half], part[half:]
            for i in range(half):
                low[i] = np.float32(np.int8(np.uint8(np.uint8(codes[i]) << np.uint8(4))) >> 4) * scale
            for i in range(count - half):
                high[i] = np.float32(np.int8(codes[i]) >> 4) * scale


@kernel
def absmax_accumulate(
    bodies: tuple[ByteArray, ...],
    coefficients: FloatArray,
    count: int,
    fresh: bool,
    out: FloatArray,
    width: int,
    row_bytes: int,
    bits: int,
    first: int,
    last: int,
) -> None:
    """Decode and `accumulate` in one pass, blocks `first` to `last`, with one coefficient for each body."""
    per_row = -(-width // ABSMAX_BLOCK)
    decoded = np.empty(CACHED_BLOCKS * ABSMAX_BLOCK, np.float32)
    for begin in range(first, last, CACHED_BLOCKS):
        end = min(begin + CACHED_BLOCKS, last)
        start = begin // per_row * width + begin % per_row * ABSMAX_BLOCK
        stop = end // per_row * width + end % per_row * ABSMAX_BLOCK
        total = out[start:stop]
        for m in range(count):
            absmax_decode(bodies[m], decoded, start, width, row_bytes, bits, begin, end)
            c = coefficients[m]
            if fresh and m == 0:
                for i in range(total.size):
                    total[i] = c * decoded[i]
            else:
                for i in range(total.size):
                    total[i] += c * decoded[i]


@kernel
def bf16_accumulate(
    bodies: tuple[HalfBits, ...],
    coefficients: FloatArray,
    count: int,
    fresh: bool,
    out: FloatArray,
    first: int,
    last: int,
) -> None:
    """Decode and `accumulate` in one pass, values `first` to `last`, with one coefficient for each body."""
    block = np.empty(LANES * 16, np.uint32)
    deltas = block.view(np.float32)
    for start in range(first, last, block.size):
        size = min(block.size, last - start)
        total = out[start : start + size]
        for m in range(count):
            halves, c = bodies[m][start : start + size], coefficients[m]
            for i in range(size):
                block[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))
            if fresh and m == 0:
                for i in range(size):
                    total[i] = c * deltas[i]
            else:
                for i in range(size):
                    total[i] += c * deltas[i]


# ---- top-k --------------------------------------------------------------------------------------------------------


@kernel
def topk_count(values: int) -> int:
    """How many of a block are kept: 9 %, rounded up."""
    return (TOPK_PERCENT * values + 99) // 100


@kernel
def topk_encode(
    base: FloatArray,
    theta: FloatArray,
    feedback: FloatArray,
    rest: FloatArray,
    out: ByteArray,
    first: int,
    last: int,
) -> None:
    """Blocks `first` to `last` of t = (base − θ) + feedback. As in `absmax_encode`, t is made in place: a call for each
    block costs a third of the speed."""
    values, sizes = np.empty(TOPK_BLOCK, np.float32), np.empty(TOPK_BLOCK, np.int32)
    words = values.view(np.int32)
    block_bytes = 2 + 2 * topk_count(TOPK_BLOCK)
    for number in range(first, last):
        start = number * TOPK_BLOCK
        count = min(TOPK_BLOCK, base.size - start)
        keep = topk_count(count)
        values[:count] = base[start : start + count]
        if theta.size:
            part = theta[start : start + count]
            for i in range(count):
                values[i] -= part[i]
        if feedback.size:
            part = feedback[start : start + count]
            for i in range(count):
                values[i] += part[i]
        most = np.int32(0)
        for i in range(count):
            sizes[i] = np.int32(words[i] & np.int32(0x7FFFFFFF))
            most = max(most, sizes[i])
        scale = absmax_scale(most, 6)
        body = out[number * block_bytes : number * block_bytes + 2 + 2 * keep]
        body[0] = np.uint8((scale >> np.uint32(16)) & np.uint32(255))
        body[1] = np.uint8(scale >> np.uint32(24))
        if scale >= np.uint32(0x7F800000):
            values[:count] = 0
            sizes[:count] = 0
            scale = np.uint32(0)
        inverse = np.float32(1) / float_of(scale) if scale else np.float32(0)
        least = np.int32(0)  # the size of the last one that is kept, bit by bit
        for bit in range(30, -1, -1):
            tried, found = np.int32(least | (1 << bit)), np.int32(0)
            for i in range(count):
                found = np.int32(found + np.int32(sizes[i] >= tried))
            if found >= keep:
                least = tried
            if found == keep:
                break
        ties = keep
        for i in range(count):
            ties -= sizes[i] > least
        if rest.size:
            rest[start : start + count] = values[:count]
        kept = 0
        for i in range(count):
            if sizes[i] < least:
                continue
            if sizes[i] == least:
                if ties == 0:
                    continue
                ties -= 1
            code = np.int32(min(max(np.rint(values[i] * inverse), np.float32(-31)), np.float32(31)))
            word = np.uint32(np.uint32(i << 6) | np.uint32(code & 63))
            body[2 + 2 * kept] = np.uint8(word & np.uint32(255))
            body[3 + 2 * kept] = np.uint8(word >> np.uint32(8))
            kept += 1
            if rest.size:
                rest[start + i] = values[i] - np.float32(code) * float_of(scale)


@kernel
def topk_check(data: ByteArray, size: int) -> int:
    """−1, or the first block at fault times 4, plus 0 for its scale, 1 for a code and 2 for an offset."""
    block_bytes = 2 + 2 * topk_count(TOPK_BLOCK)
    highest = bits_of(np.float32(3.4028235e38) / np.float32(31))
    for number in range((size + TOPK_BLOCK - 1) // TOPK_BLOCK):
        count = min(TOPK_BLOCK, size - number * TOPK_BLOCK)
        at = number * block_bytes
        scale = absmax_scale_at(data, at, 6)
        if scale != 0 and not np.uint32(0x00800000) <= scale <= highest:
            return 4 * number
        before = np.int32(-1)
        for k in range(topk_count(count)):
            word = np.int32(data[at + 2 + 2 * k]) | np.int32(data[at + 3 + 2 * k]) << 8
            if word & 63 == 32:
                return 4 * number + 1
            if not before < word >> 6 < count:
                return 4 * number + 2
            before = word >> 6
    return -1


@kernel
def topk_decode(data: ByteArray, out: FloatArray, first: int, last: int) -> None:
    """Blocks `first` to `last` of a checked body."""
    block_bytes = 2 + 2 * topk_count(TOPK_BLOCK)
    for number in range(first, last):
        part = out[number * TOPK_BLOCK : min((number + 1) * TOPK_BLOCK, out.size)]
        part[:] = 0
        at = number * block_bytes
        scale = float_of(absmax_scale_at(data, at, 6))
        for k in range(topk_count(part.size)):
            word = np.int32(data[at + 2 + 2 * k]) | np.int32(data[at + 3 + 2 * k]) << 8
            code = (word & 63) - ((word & 32) << 1)
            if word >> 6 < part.size:
                part[word >> 6] = np.float32(code) * scale


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
    nesterov_update(given, given, y, one, one)
    nesterov_advance(z, given, one, one, one)
    bf16_encode(given, halves)
    bf16_encode_delta(given, given, halves)
    bf16_decode(read_only(halves), y.view(np.uint32))
    bf16_round(y.view(np.uint32))
    none, body = given[:0], np.zeros(64, np.uint8)
    absmax_encode(given, none, none, y[:0], body, 2, 3, 4, 0, 1)
    absmax_check(read_only(body), 2, 3, 4, 0, 1)
    absmax_decode(read_only(body), y, 0, 2, 3, 4, 0, 1)
    shares = read_only(np.ones(GROUP, np.float32))
    absmax_accumulate((read_only(body),) * GROUP, shares, 1, True, y, 2, 3, 4, 0, 1)
    bf16_accumulate((read_only(halves),) * GROUP, shares, 1, True, y, 0, 2)
    topk_encode(given, none, none, y[:0], body, 0, 1)
    topk_check(read_only(body), 2)
    topk_decode(read_only(body), y, 0, 1)
