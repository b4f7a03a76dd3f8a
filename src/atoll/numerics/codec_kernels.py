"""The compiled loops of the codecs: bf16, int8 and int4, top-k. They keep the rules of kernels.py.

Those that decode take runs of values of one tensor: as many from each of `starts` on as fill `out`, one behind the
other. That is how a merge reads some rows of a body, a sample its blocks, and all of it is a single run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray, HalfBits, IndexArray
from atoll.numerics.compiled import kernel, read_only

ABSMAX_BLOCK = 64
"""Values with one scale: 128 would save 3 % of the bytes and err by 9 % (Gaussian) to 20 % (heavy tails) more."""
TOPK_BLOCK = 1024
"""Values of which a few are kept: an offset in it has 10 bits, and with a code of 6 bits it fills 2 bytes."""
TOPK_PERCENT = 9
"""As many as a twentieth of the bytes of float32 allows: the fewer are sent, the later the others come."""


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
def fp32_decode(values: FloatArray, out: FloatArray, starts: IndexArray) -> None:
    size = out.size // starts.size
    for k in range(starts.size):
        out[k * size : (k + 1) * size] = values[starts[k] : starts[k] + size]


@kernel
def bf16_decode(halves: HalfBits, out: NDArray[np.uint32], starts: IndexArray) -> None:
    size = out.size // starts.size
    for k in range(starts.size):
        given, part = halves[starts[k] : starts[k] + size], out[k * size : (k + 1) * size]
        for i in range(part.size):
            part[i] = np.uint32(np.uint32(given[i]) << np.uint32(16))


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
def absmax_reserved(codes: np.uint8, others: np.uint8) -> np.uint8:
    """The signs of codes that have no other bit; `others`: the bits that are no signs. Adding these sets the bit of a
    sign where another bit of its code is set."""
    return np.uint8(codes & ~np.uint8((codes & others) + others) & ~others)


@kernel
def absmax_lacks_faults(data: ByteArray, bits: int) -> bool:
    """Of whole blocks that lie side by side: all of them together, five times as fast as one after the other."""
    head = 2 if bits == 4 else 3
    full = head + ABSMAX_BLOCK * bits // 8
    blocks, lanes = data[: data.size // full * full].reshape(-1, full), np.zeros(full - head, np.uint8)
    highest = bits_of(np.float32(3.4028235e38) / np.float32(7 if bits == 4 else 127))
    others, wrong = np.uint8(0x77 if bits == 4 else 0x7F), False
    for n in range(len(blocks)):
        given = blocks[n]
        scale = absmax_scale_at(given, 0, bits)
        wrong |= scale != 0 and not np.uint32(0x00800000) <= scale <= highest
        for i in range(lanes.size):  # a lane each, so that vectors of them are not added up block by block
            lanes[i] |= absmax_reserved(given[i + head], others)
    for i in range(lanes.size):
        wrong |= lanes[i] != 0
    return not wrong


@kernel
def absmax_check(data: ByteArray, width: int, row_bytes: int, bits: int, first: int, last: int) -> int:
    """−1, or the first block at fault times 2, plus 0 for its scale and 1 for its codes."""
    head = 2 if bits == 4 else 3
    per_row, full = -(-width // ABSMAX_BLOCK), head + ABSMAX_BLOCK * bits // 8
    highest = bits_of(np.float32(3.4028235e38) / np.float32(7 if bits == 4 else 127))
    others = np.uint8(0x77 if bits == 4 else 0x7F)
    if width % ABSMAX_BLOCK == 0 and absmax_lacks_faults(data[first * full : last * full], bits):
        return -1
    for number in range(first, last):
        row = number // per_row
        place = number - row * per_row
        count = min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)
        at = row * row_bytes + place * full
        scale = absmax_scale_at(data, at, bits)
        if scale != 0 and not np.uint32(0x00800000) <= scale <= highest:
            return 2 * number
        packed = data[at + head : at + head + (count * bits + 7) // 8]
        wrong = np.uint8(0)
        for i in range(packed.size):
            wrong = np.uint8(wrong | absmax_reserved(packed[i], others))
        if wrong or (bits == 4 and count % 2 == 1 and packed[-1] >> 4 != 0):
            return 2 * number + 1
    return -1


@kernel
def absmax_decode_blocks(data: ByteArray, out: FloatArray, bits: int) -> None:
    """Whole blocks of 64, which lie side by side in both arrays: code times scale, which is exact."""
    head, blocks = 2 if bits == 4 else 3, out.size // ABSMAX_BLOCK
    full = head + ABSMAX_BLOCK * bits // 8
    codes, values = data[: blocks * full].reshape(blocks, full), out.reshape(blocks, ABSMAX_BLOCK)
    for n in range(blocks):
        # As rows of two dimensions they need no slices, which cost a third of the time.
        given, part = codes[n], values[n]
        scale = float_of(absmax_scale_at(given, 0, bits))
        if bits == 8:
            for i in range(part.size):
                part[i] = np.float32(np.int8(given[i + head])) * scale
        else:
            half = given.size - head
            for i in range(half):
                part[i] = np.float32(np.int8(np.uint8(np.uint8(given[i + head]) << np.uint8(4))) >> 4) * scale
            for i in range(half):
                part[i + half] = np.float32(np.int8(given[i + head]) >> 4) * scale


@kernel
def absmax_decode_block(data: ByteArray, out: FloatArray, bits: int) -> None:
    """One block of as many values as `out` has."""
    head = 2 if bits == 4 else 3
    scale = float_of(absmax_scale_at(data, 0, bits))
    half = (out.size + 1) // 2
    for i in range(out.size):
        if bits == 8:
            code = np.int8(data[head + i])
        elif i < half:
            code = np.int8(np.int8(np.uint8(np.uint8(data[head + i]) << np.uint8(4))) >> 4)
        else:
            code = np.int8(np.int8(data[head + i - half]) >> 4)
        out[i] = np.float32(code) * scale


@kernel
def absmax_decode_run(
    data: ByteArray, out: FloatArray, start: int, width: int, row_bytes: int, bits: int, room: FloatArray
) -> None:
    """One run: as many values from `start` on as fill `out`. `room`: for a block that it has only a part of."""
    full, done = (2 if bits == 4 else 3) + ABSMAX_BLOCK * bits // 8, 0
    while done < out.size:
        row = (start + done) // width
        first = start + done - row * width  # in its row
        last = min(width, first + out.size - done)
        if width % ABSMAX_BLOCK == 0:
            last = first + out.size - done  # blocks lie side by side over rows
        place = first // ABSMAX_BLOCK
        given = data[row * row_bytes + place * full :]
        part = out[done : done + last - first]
        before = first - place * ABSMAX_BLOCK
        if before == 0 and part.size >= ABSMAX_BLOCK:
            count = part.size - part.size % ABSMAX_BLOCK
            absmax_decode_blocks(given, part[:count], bits)
        else:
            block = room[: min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)]
            absmax_decode_block(given, block, bits)
            count = min(part.size, block.size - before)
            part[:count] = block[before : before + count]
        done += count


@kernel
def absmax_decode(data: ByteArray, out: FloatArray, starts: IndexArray, width: int, row_bytes: int, bits: int) -> None:
    """Of a checked body of rows of `width` values."""
    size, room = out.size // starts.size, np.empty(ABSMAX_BLOCK, np.float32)
    for k in range(starts.size):
        absmax_decode_run(data, out[k * size : (k + 1) * size], starts[k], width, row_bytes, bits, room)


HALF_CODE = np.float32(1 / 254)
"""Of the largest of a block, which is code 127: the least that a positive root of a squared moment may be."""
TINY = np.float32(np.finfo(np.float32).tiny)


@kernel
def absmax_add_moment(
    data: ByteArray, total: DoubleArray, width: int, row_bytes: int, share: float, squared: bool, rows: int
) -> None:
    """total ← total + share · moment, of a checked body of int8 rows; a squared moment is the square of what is there.

    What is positive in it stays so: a root has at least half a code of its block, its square is a normal number.
    """
    per_row, full = -(-width // ABSMAX_BLOCK), 3 + ABSMAX_BLOCK
    for number in range(rows * per_row):
        row = number // per_row
        place = number - row * per_row
        start = row * width + place * ABSMAX_BLOCK
        count = min(ABSMAX_BLOCK, width - place * ABSMAX_BLOCK)
        at = row * row_bytes + place * full
        scale = float_of(absmax_scale_at(data, at, 8))
        part, codes = total[start : start + count], data[at + 3 :]
        if not squared:
            for i in range(count):
                part[i] += np.float64(np.float32(np.int8(codes[i])) * scale) * share
            continue
        most = np.int8(0)
        for i in range(count):
            most = max(most, np.int8(codes[i]))
        least = np.float32(most) * scale * HALF_CODE
        if least > 0:
            for i in range(count):
                root = max(np.float32(np.int8(codes[i])) * scale, least)
                part[i] += np.float64(max(root * root, TINY)) * share


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
def topk_decode(data: ByteArray, out: FloatArray, starts: IndexArray, values: int) -> None:
    """Of a checked body of a tensor of so many values."""
    block_bytes, size = 2 + 2 * topk_count(TOPK_BLOCK), out.size // starts.size
    out[:] = 0
    for k in range(starts.size):
        part = out[k * size : (k + 1) * size]
        for number in range(starts[k] // TOPK_BLOCK, (starts[k] + size + TOPK_BLOCK - 1) // TOPK_BLOCK):
            at, first = number * block_bytes, number * TOPK_BLOCK
            count = min(TOPK_BLOCK, values - first)
            scale = float_of(absmax_scale_at(data, at, 6))
            for n in range(topk_count(count)):
                word = np.int32(data[at + 2 + 2 * n]) | np.int32(data[at + 3 + 2 * n]) << 8
                code = (word & 63) - ((word & 32) << 1)
                place = first + (word >> 6) - starts[k]
                if word >> 6 < count and 0 <= place < part.size:
                    part[place] = np.float32(code) * scale


def warm() -> None:
    x, y = np.ones(2, np.float32), np.ones(2, np.float32)
    given, halves = read_only(x), np.zeros(2, np.uint16)
    bf16_encode(given, halves)
    bf16_encode_delta(given, given, halves)
    starts = read_only(np.zeros(1, np.int64))
    fp32_decode(given, y, starts)
    bf16_decode(read_only(halves), y.view(np.uint32), starts)
    bf16_round(y.view(np.uint32))
    none, body = given[:0], np.zeros(64, np.uint8)
    absmax_encode(given, none, none, y[:0], body, 2, 3, 4, 0, 1)
    absmax_check(read_only(body), 2, 3, 4, 0, 1)
    absmax_decode(read_only(body), y, starts, 2, 3, 4)
    absmax_add_moment(read_only(body), np.zeros(2, np.float64), 2, 5, 1.0, True, 1)
    topk_encode(given, none, none, y[:0], body, 0, 1)
    topk_check(read_only(body), 2)
    topk_decode(read_only(body), y, starts, 2)
