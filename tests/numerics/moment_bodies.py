"""The moments of a fragment as the bytes that learners and the syncer exchange, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, count_values, make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, HALF_CODE, TINY
from atoll.numerics.fragments import Fragment, Rows
from atoll.numerics.moments import CODEC, Moment, encode_moment, list_moments, moments_nbytes, read_forms

INT8 = make_codec(CODEC)
Values = dict[tuple[int, int], FloatArray]
"""By piece and slot."""


def pack(part: Fragment, forms: Sequence[int], values: Values) -> ByteArray:
    body = np.zeros(moments_nbytes(INT8, part, forms), np.uint8)
    body[: len(part.pieces)] = forms
    for moment in list_moments(INT8, part, forms):
        encode_moment(INT8, moment, values[moment.piece, moment.slot], body)
    return body


def unpack(part: Fragment, body: ByteArray) -> Values:
    found = list_moments(INT8, part, read_forms(part, body))
    return {(moment.piece, moment.slot): decode_moment(INT8, moment, body) for moment in found}


def decode_moment(codec: Codec, moment: Moment, data: ByteArray) -> FloatArray:
    """As it is defined; `average_moments` and learners do it in one pass."""
    values = np.empty(count_values(moment.rows), np.float32)
    codec.decode(data[moment.data], moment.rows, values)
    if not moment.squared:
        return values
    np.maximum(values, _floor_roots(values, moment.rows), out=values)
    positive = values > 0
    np.square(values, out=values)
    return np.maximum(values, TINY, out=values, where=positive)


def _floor_roots(roots: FloatArray, rows: Rows) -> FloatArray:
    """Half a code of each value's block."""
    floors, start = [], 0
    for count, width in rows:
        values = roots[start : start + count * width].reshape(count, width)
        largest = np.maximum.reduceat(values, range(0, width, ABSMAX_BLOCK), axis=1)
        floors.append(np.repeat(largest * HALF_CODE, ABSMAX_BLOCK, axis=1)[:, :width].reshape(-1))
        start += count * width
    return np.concatenate(floors)
