"""The compiled loops that add up contributions, four at a time: of values, and straight from bodies.

A sum of bodies has the bits of the sum of what they decode to: each value is decoded, scaled and added in the same
order. It only never lies decoded in memory (docs/adr/0036). They keep the rules of kernels.py.
"""

from __future__ import annotations

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray, HalfBits
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, absmax_decode_run, float_of
from atoll.numerics.compiled import kernel, read_only

GROUP = 4
"""Contributions that are added at once, without a sum in memory in between."""
DECODED = 1024
"""Values of a body that are decoded at a time where they are added up: of a group they fit the first cache."""


@kernel
def add_group(out: FloatArray, deltas: tuple[FloatArray, ...], scales: FloatArray, count: int, fresh: bool) -> None:
    """out ← out + Σ c Δ over the first `count` of four, in order; `fresh` starts with the first. Each case is a loop of
    its own, because a compiled loop has as many instructions as it has terms."""
    a, b, c, d = deltas
    p, q, r, s = scales[0], scales[1], scales[2], scales[3]
    if fresh:
        if count == 4:
            for i in range(out.size):
                out[i] = ((p * a[i] + q * b[i]) + r * c[i]) + s * d[i]
        elif count == 3:
            for i in range(out.size):
                out[i] = (p * a[i] + q * b[i]) + r * c[i]
        elif count == 2:
            for i in range(out.size):
                out[i] = p * a[i] + q * b[i]
        else:
            for i in range(out.size):
                out[i] = p * a[i]
    elif count == 4:
        for i in range(out.size):
            out[i] = (((out[i] + p * a[i]) + q * b[i]) + r * c[i]) + s * d[i]
    elif count == 3:
        for i in range(out.size):
            out[i] = ((out[i] + p * a[i]) + q * b[i]) + r * c[i]
    elif count == 2:
        for i in range(out.size):
            out[i] = (out[i] + p * a[i]) + q * b[i]
    else:
        for i in range(out.size):
            out[i] = out[i] + p * a[i]


@kernel
def bf16_value(half: np.uint16) -> np.float32:
    return float_of(np.uint32(np.uint32(half) << np.uint32(16)))


@kernel
def bf16_add(out: FloatArray, halves: HalfBits, scale: np.float32, fresh: bool) -> None:
    if fresh:
        for i in range(out.size):
            out[i] = scale * bf16_value(halves[i])
    else:
        for i in range(out.size):
            out[i] = out[i] + scale * bf16_value(halves[i])


@kernel
def bf16_add_group(out: FloatArray, bodies: tuple[HalfBits, ...], scales: FloatArray, count: int, fresh: bool) -> None:
    """`add_group` of bf16. Fewer than four are added one after the other, which is the same order."""
    a, b, c, d = bodies
    p, q, r, s = scales[0], scales[1], scales[2], scales[3]
    if count < GROUP:
        for m in range(count):
            bf16_add(out, bodies[m], scales[m], fresh and m == 0)
    elif fresh:
        for i in range(out.size):
            total = p * bf16_value(a[i]) + q * bf16_value(b[i])
            out[i] = (total + r * bf16_value(c[i])) + s * bf16_value(d[i])
    else:
        for i in range(out.size):
            total = (out[i] + p * bf16_value(a[i])) + q * bf16_value(b[i])
            out[i] = (total + r * bf16_value(c[i])) + s * bf16_value(d[i])


@kernel
def absmax_add_group(
    out: FloatArray,
    bodies: tuple[ByteArray, ...],
    scales: FloatArray,
    count: int,
    fresh: bool,
    start: int,
    width: int,
    row_bytes: int,
    bits: int,
) -> None:
    """`add_group` of int8 or int4, of a tensor's values from `start` on."""
    room, block = np.empty((GROUP, DECODED), np.float32), np.empty(ABSMAX_BLOCK, np.float32)
    for at in range(0, out.size, DECODED):
        part = out[at : at + DECODED]
        size = part.size
        for m in range(count):
            absmax_decode_run(bodies[m], room[m, :size], start + at, width, row_bytes, bits, block)
        add_group(part, (room[0, :size], room[1, :size], room[2, :size], room[3, :size]), scales, count, fresh)


def warm() -> None:
    out, scales = np.ones(2, np.float32), read_only(np.ones(GROUP, np.float32))
    bf16_add_group(out, (read_only(np.zeros(2, np.uint16)),) * GROUP, scales, 2, True)
    absmax_add_group(out, (read_only(np.zeros(64, np.uint8)),) * GROUP, scales, 2, True, 0, 2, 3, 4)
