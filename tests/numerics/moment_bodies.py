"""The moments of a fragment as the bytes that learners and the syncer exchange, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import Fragment
from atoll.numerics.moments import CODEC, decode_moment, encode_moment, list_moments, moments_nbytes, read_forms

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
