"""The inner optimizer's moments of a fragment, as they travel: up behind a contribution, and down averaged.

A body of moments is one byte for each piece of the fragment, its form, and then the moments of each piece by int8, in
the order of pieces and of the form. So its length follows from its first bytes. A form says what an optimizer keeps of
a parameter; only moments of equal forms are averaged.

Rules kept here:
- a squared moment travels as its root. What is not zero there has at least half a code of its block when it is decoded,
  and at least the smallest normal float32 when it is squared: a positive one never becomes zero. A block of zeros stays
  zero;
- the mean is Σ wm / Σ w, in float64 in the order that is given, of those that have the form with the most weight;
- of three and more, one that is LOUD times as large as the median is left out: it would drown the others;
- what is not finite, a squared moment below zero or past float32, another length or an unknown form is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atoll.numerics.arrays import ByteArray, DoubleArray, FloatArray
from atoll.numerics.codec import Codec, count_values, make_codec
from atoll.numerics.codec_kernels import TINY, absmax_add_moment
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.fragments import Fragment, FragmentPlan, Rows, row_lengths
from atoll.protocol.errors import PeerError

CODEC = "int8"
SIGNED, SQUARED = "signed", "squared"
FORMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "adam": (SIGNED, SQUARED),
    "momentum": (SIGNED,),
    "mean": (SIGNED,),
    "square": (SQUARED,),
}
"""What an optimizer keeps of a parameter; a byte names them by their place here. `momentum` is a sum of gradients,
`mean` and `square` are moving means of them and of their squares, `adam` is both."""
MOST_SLOTS = max(map(len, FORMS.values()))
NAMES = tuple(FORMS)
NONE = NAMES.index("none")
RUN = 1 << 16
"""Values of a moment that one thread averages at a time: sums of 512 KiB stay in cache."""
LOUD = 10.0
"""Times the median root mean square of a moment."""
LARGEST_ROOT = np.float32(1.8446743e19)
"""Its square is still a float32."""


class Moment(NamedTuple):
    """One moment of one piece, and where its bytes are."""

    piece: int
    slot: int
    """Which of its form."""
    squared: bool
    rows: Rows
    data: slice


def list_moments(codec: Codec, part: Fragment, forms: Sequence[int]) -> list[Moment]:
    found, start = [], len(part.pieces)
    for number, (piece, form) in enumerate(zip(part.pieces, forms, strict=True)):
        rows = row_lengths([piece])
        for slot, kind in enumerate(FORMS[NAMES[form]]):
            stop = start + codec.nbytes(rows)
            found.append(Moment(number, slot, kind == SQUARED, rows, slice(start, stop)))
            start = stop
    return found


def cut_rows(codec: Codec, moment: Moment) -> list[Moment]:
    """Runs of rows that stay in cache. Blocks start anew at every row, so a run's bytes are those that it has here."""
    ((count, width),) = moment.rows
    step, row_bytes = max(1, RUN // max(1, width)), codec.nbytes(((1, width),))
    return [
        moment._replace(
            rows=((min(step, count - first), width),),
            data=slice(moment.data.start + first * row_bytes, moment.data.start + min(first + step, count) * row_bytes),
        )
        for first in range(0, count, step)
    ]


def moments_nbytes(codec: Codec, part: Fragment, forms: Sequence[int]) -> int:
    moments = list_moments(codec, part, forms)
    return moments[-1].data.stop if moments else len(part.pieces)


def most_bytes(plan: FragmentPlan) -> int:
    """The bytes that hold the moments of any fragment, whatever their forms."""
    codec = make_codec(CODEC)
    return max(len(part.pieces) + MOST_SLOTS * codec.nbytes(row_lengths(part.pieces)) for part in plan.fragments)


def read_moments(part: Fragment, memory: ByteArray) -> ByteArray:
    """Of memory that begins with moments of this fragment, written by ourselves, their bytes."""
    return memory[: moments_nbytes(make_codec(CODEC), part, read_forms(part, memory))]


def read_forms(part: Fragment, data: ByteArray) -> list[int]:
    return [int(form) for form in data[: len(part.pieces)]]


def check_moments(part: Fragment, data: ByteArray, threads: int = 1) -> None:
    """PeerError unless these are moments of the fragment."""
    if data.size < len(part.pieces) or max(forms := read_forms(part, data)) >= len(NAMES):
        raise PeerError(f"its moments say no form that is known for each of {len(part.pieces)} pieces")
    codec = make_codec(CODEC, threads)
    if data.size != (expected := moments_nbytes(codec, part, forms)):
        raise PeerError(f"moments of {data.size} bytes came, those of their forms are {expected} bytes")
    for moment in list_moments(codec, part, forms):
        label = part.pieces[moment.piece].label
        try:
            codec.check(data[moment.data], moment.rows)
        except PeerError as error:
            raise PeerError(f"a moment of {label}: {error}") from None
        if moment.squared:
            _check_roots(_decode_plain(codec, moment, data), label)


def _check_roots(roots: FloatArray, label: str) -> None:
    if roots.min() < 0 or roots.max() > LARGEST_ROOT:
        raise PeerError(f"a squared moment of {label} is below zero or too large to be a float32")


# ---- one moment -----------------------------------------------------------------------------------------------------


def encode_moment(codec: Codec, moment: Moment, values: FloatArray, out: ByteArray) -> None:
    """Into the body `out`. What is not finite, or is squared and below zero, gives bytes that are refused."""
    with np.errstate(invalid="ignore"):
        codec.encode(np.sqrt(values) if moment.squared else values, moment.rows, out[moment.data])


def _decode_plain(codec: Codec, moment: Moment, data: ByteArray) -> FloatArray:
    values = np.empty(sum(count * width for count, width in moment.rows), np.float32)
    codec.decode(data[moment.data], moment.rows, values)
    return values


# ---- the mean -------------------------------------------------------------------------------------------------------


def average_moments(
    part: Fragment,
    bodies: Sequence[ByteArray],
    weights: Sequence[float],
    factors: Sequence[FloatArray] = (),
    threads: int = 1,
) -> ByteArray:
    """Of bodies that were checked; `factors`: per contribution and piece, what a filter left of it."""
    codec, forms = make_codec(CODEC), [read_forms(part, body) for body in bodies]
    pieces = range(len(part.pieces))
    kept = factors or [np.ones(len(pieces), np.float32)] * len(bodies)
    shares = [[weight * float(of[piece]) for weight, of in zip(weights, kept, strict=True)] for piece in pieces]
    chosen = [_choose_form([of[piece] for of in forms], shares[piece]) for piece in pieces]
    out = np.empty(moments_nbytes(codec, part, chosen), np.uint8)
    out[: len(pieces)] = chosen
    placed = [_by_place(codec, part, of) for of in forms]
    for moment in list_moments(codec, part, chosen):
        piece = moment.piece
        counted = [n for n, of in enumerate(forms) if of[piece] == chosen[piece] and shares[piece][n] > 0]
        sent = [SentMoment(placed[n][piece, moment.slot], bodies[n], shares[piece][n]) for n in counted]
        if len(sent) > 2:
            sizes = _measure_gradients(codec, sent, threads)
            sent = [one for one, size in zip(sent, sizes, strict=True) if size <= LOUD * np.median(sizes)]
        _average_moment(codec, moment, sent, out, threads)
    return out


class SentMoment(NamedTuple):
    moment: Moment
    body: ByteArray
    share: float


def _measure_gradients(codec: Codec, sent: Sequence[SentMoment], threads: int) -> DoubleArray:
    """By sender, the root mean square of the gradients that its moment stands for."""
    runs = [cut_rows(codec, one.moment) for one in sent]
    sums = np.empty((len(sent), len(runs[0])))

    def work(first: int, last: int) -> None:
        for run in range(first, last):
            values = np.zeros(count_values(runs[0][run].rows))
            for number, one in enumerate(sent):
                values.fill(0.0)
                _add_moment(codec, runs[number][run], one.body, 1.0, values)
                sums[number, run] = np.sum(values if one.moment.squared else np.square(values, out=values))

    in_parts(work, len(runs[0]), 1, threads)
    roots: DoubleArray = np.sqrt(sums.sum(axis=1) / count_values(sent[0].moment.rows))
    return roots


def _average_moment(codec: Codec, moment: Moment, sent: Sequence[SentMoment], out: ByteArray, threads: int) -> None:
    """Into the body `out`."""
    runs, written = [cut_rows(codec, one.moment) for one in sent], cut_rows(codec, moment)
    whole = sum(one.share for one in sent)

    def work(first: int, last: int) -> None:
        for run in range(first, last):
            total = np.zeros(count_values(written[run].rows))
            for of, one in zip(runs, sent, strict=True):
                _add_moment(codec, of[run], one.body, one.share, total)
            mean = (total / whole).astype(np.float32)
            if moment.squared:
                np.maximum(mean, TINY, out=mean, where=total > 0)
            encode_moment(codec, written[run], mean, out)

    in_parts(work, len(written), 1, threads)


def _add_moment(codec: Codec, moment: Moment, body: ByteArray, share: float, total: DoubleArray) -> None:
    """total ← total + share · what its bytes say: of squares, the square of a root that is at least half
    a code of its block and at least TINY, where there is any."""
    ((count, width),) = moment.rows
    row_bytes = codec.nbytes(((1, width),))
    absmax_add_moment(read_only(body[moment.data]), total, width, row_bytes, share, moment.squared, count)


def _by_place(codec: Codec, part: Fragment, forms: Sequence[int]) -> dict[tuple[int, int], Moment]:
    return {(moment.piece, moment.slot): moment for moment in list_moments(codec, part, forms)}


def _choose_form(forms: Sequence[int], shares: Sequence[float]) -> int:
    """The one with the most weight, and of equals the first; none where nobody has any."""
    sums: dict[int, float] = {}
    for form, share in zip(forms, shares, strict=True):
        if form != NONE and share > 0:
            sums[form] = sums.get(form, 0.0) + share
    return max(sums, key=sums.__getitem__, default=NONE)
