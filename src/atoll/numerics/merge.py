"""Many contributions into one outer gradient.

The rules are the modules of merges/. All of them keep this:
- embeddings use the mean, but for a rule that says otherwise (`MERGES_EMBEDDINGS`);
- buffers use the mean too, or (rule "first") are those of the first contribution that weighs anything;
- what the filter leaves out of a piece is as if it had not been given there; factors of 1 change no bit;
- one contribution comes out as itself, bit for bit; one of weight 0 is as if it were not there;
- sums run in float32 in the order given (the caller's: by learner id), norms in float64: equal inputs, equal bits;
- pieces are cut by rows, and threads share the cuts: no bit depends on that. Contributions to a cut are decoded into
  a room of the thread's own, and what follows finds them in its cache (docs/adr/0036);
- a rule that needs the norm of a whole piece ("rda") has it as the exact sum of the squares of its cuts, so shards of a
  syncer that hold a piece together (docs/adr/0031) tell each other these and come to the same (`NormExchange`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from atoll.choices import MERGE
from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray, IndexArray
from atoll.numerics.compiled import PART, in_parts, read_only
from atoll.numerics.deltas import BodySum, GivenDelta, ReadableDelta, as_readable, sum_bodies
from atoll.numerics.fragments import Fragment, Piece
from atoll.numerics.group_kernels import GROUP
from atoll.protocol.messages import TensorSpec

ROOM = 1 << 20
"""Values of all contributions to a cut together: 4 MiB. Smaller ones fit a core's own cache better, but with each cut
the threads hand the interpreter to each other several times: on two loaded cores rda-row of four bf16 bodies of 64 MiB
took 51 to 62 ms, with half of this room 72 to 77, with a quarter 95."""
MEAN_CUT = 1 << 19
"""Values of a cut whose mean is taken straight from the bodies, which needs no room. A PART makes twice as many
hand-overs: with it four bf16 bodies of 64 MiB took 23.6 ms on two idle cores, with this 21.2, with more no less."""
LEAST_CUT = 1 << 14
"""Values of a cut, however many contributions there are."""


class Terms(NamedTuple):
    """What is merged into one piece: whole contributions, what the filter makes of each there, and w / Σ w."""

    deltas: list[ReadableDelta]
    factors: list[np.float32]
    shares: DoubleArray


class Cut(NamedTuple):
    """Rows of a piece that are merged at a time."""

    number: int
    """Of the piece in its fragment."""
    piece: Piece
    values: slice
    start: IndexArray
    """The one value of the piece that it begins with, as codecs take it."""

    def read(self, deltas: Sequence[ReadableDelta], out: FloatArray) -> None:
        """What contributions have there, into [contributions, values]."""
        for delta, values in zip(deltas, out, strict=True):
            delta.read_runs(self.number, self.start, values)


class Room(threading.local):
    """Of each thread: where it decodes contributions to the cut that it works on."""

    values: FloatArray = np.empty(0, np.float32)

    def read_cut(self, cut: Cut, deltas: Sequence[ReadableDelta], factors: Sequence[np.float32] = ()) -> FloatArray:
        """[contributions, values of the cut], until the next is read."""
        size = cut.values.stop - cut.values.start
        if self.values.size < len(deltas) * size:
            self.values = np.empty(len(deltas) * size, np.float32)
        found = self.values[: len(deltas) * size].reshape(len(deltas), size)
        cut.read(deltas, found)
        for factor, values in zip(factors, found, strict=False):
            if factor != 1:
                values *= factor
        return found


Gather = Callable[[DoubleArray], Sequence[DoubleArray]]


class NormExchange(NamedTuple):
    """Of a part of a fragment, whose pieces may go on in other shards: how to learn the squares of their cuts."""

    whole: Fragment
    parts: Sequence[Fragment]
    """Of all shards that hold any of it, in order; the merged fragment is one of them."""
    gather: Gather
    """What every one of them gave to this call, in order. ValueError: one of them gave nothing, so the round is
    void."""


def merge(
    fragment: Fragment,
    deltas: Sequence[GivenDelta],
    weights: Sequence[float],
    out: FloatArray,
    rule: str,
    factors: Sequence[FloatArray] = (),
    threads: int = 1,
    then: Callable[[Cut], None] | None = None,
    exchange: NormExchange | None = None,
) -> None:
    """The outer gradient of one fragment into `out`, which is none of the deltas. ValueError where Σ w = 0; then
    nothing was changed.

    `factors`: of each contribution, per piece, what the filter (filter.py) makes of it; empty: nothing.
    `then` is called for each part of `out` that is done, while it is in the cache of that thread.
    `exchange`: the fragment is a shard's part of a larger one.
    """
    by, room = MERGE.load(rule), Room()
    assert out.shape == (fragment.size,), "it is one whole fragment"
    readable = [as_readable(fragment, delta) for delta in deltas]
    if any((one != 1).any() for one in factors):
        terms = _filtered_terms(fragment, readable, weights, factors)
    else:
        terms = [_terms(readable, weights)] * len(fragment.pieces)
    pairs = [(piece, len(one.deltas) > 1) for piece, one in zip(fragment.pieces, terms, strict=True)]
    by_norms = [several and _merges_by_norms(piece, by) for piece, several in pairs]
    means = [
        _find_mean(number, piece, one) if _takes_mean(piece, by) else None
        for number, (piece, one) in enumerate(zip(fragment.pieces, terms, strict=True))
    ]
    sums = _sum_by_norms(fragment, by_norms, terms, out, by, room, threads, exchange)
    limits = [
        PART if number in sums else MEAN_CUT if means[number] else _most_values(several, piece, terms[number], by)
        for number, (piece, several) in enumerate(pairs)
    ]
    cuts = cut_fragment(fragment, limits)

    def work(first: int, last: int) -> None:
        for cut in cuts[first:last]:
            if (of := sums.get(cut.number)) is not None:
                _lengthen_cut(cut, of, terms[cut.number], out[cut.values], by, room)
            elif (mean := means[cut.number]) is not None:
                mean.add_values(int(cut.start[0]), out[cut.values])
            else:
                _merge_cut(cut, terms[cut.number], out[cut.values], by, room)
            if then is not None:
                then(cut)

    in_parts(work, len(cuts), 1, threads)


def _most_values(several: bool, piece: Piece, terms: Terms, by: Any) -> int:
    """Of a cut of this piece; one whose rows do not merge apart is not cut."""
    if several and not _merges_rows_apart(piece, by):
        return piece.size
    return max(LEAST_CUT, min(PART, ROOM // max(1, len(terms.deltas))))


# ---- rules that need the norm of a whole piece ----------------------------------------------------------------------


class SumByNorms(NamedTuple):
    """Of a piece: the mean norm, and the norm of the sum of the contributions as `weigh_directions` says."""

    radius: float
    length: float


def _sum_by_norms(
    fragment: Fragment,
    by_norms: Sequence[bool],
    terms: Sequence[Terms],
    out: FloatArray,
    by: Any,
    room: Room,
    threads: int,
    exchange: NormExchange | None,
) -> dict[int, SumByNorms]:
    """By number of the piece; `out` holds the sums of these. Two norms are told to the other shards: of each
    contribution, and of the sum."""
    few = all(len(one.deltas) < 2 for one in terms)
    if exchange is not None and (few or not any(_merges_by_norms(piece, by) for piece in exchange.whole.pieces)):
        exchange = None  # as in every shard
    cuts = [cut for cut in cut_fragment(fragment) if by_norms[cut.number]]
    squares = [np.zeros(len(terms[cut.number].deltas)) for cut in cuts]

    def measure(first: int, last: int) -> None:
        for at, cut in enumerate(cuts[first:last], start=first):
            squares[at][:] = [square_cuts(cut.piece, one)[0] for one in room.read_cut(cut, *terms[cut.number][:2])]

    in_parts(measure, len(cuts), 1, threads)
    norms = _find_norms(fragment, cuts, squares, by, exchange)
    weighed = {n: by.weigh_directions(norm, terms[n].shares) for n, norm in norms.items()}
    lengths = [np.zeros(1) for _ in cuts]

    def add(first: int, last: int) -> None:
        for at, cut in enumerate(cuts[first:last], start=first):
            add_scaled(room.read_cut(cut, *terms[cut.number][:2]), weighed[cut.number][1], out[cut.values])
            lengths[at][:] = square_cuts(cut.piece, out[cut.values])

    in_parts(add, len(cuts), 1, threads)
    length = _find_norms(fragment, cuts, lengths, by, exchange)
    return {n: SumByNorms(radius, float(length[n][0])) for n, (radius, _) in weighed.items()}


def _lengthen_cut(cut: Cut, of: SumByNorms, terms: Terms, out: FloatArray, by: Any, room: Room) -> None:
    if by.directions_cancel(of.radius, of.length):
        take_mean(room.read_cut(cut, *terms[:2]), terms.shares, out)
    else:
        by.lengthen_sum(of.radius, of.length, out)


def _find_norms(
    fragment: Fragment,
    cuts: Sequence[Cut],
    squares: Sequence[DoubleArray],
    by: Any,
    exchange: NormExchange | None,
) -> dict[int, DoubleArray]:
    """`squares`: of each cut, some figures. Of each piece that is cut here, by its number, the roots of their sums over
    all cuts that it has in any shard."""
    of_piece: dict[int, list[DoubleArray]] = {}
    if exchange is None:
        for cut, own in zip(cuts, squares, strict=True):
            of_piece.setdefault(cut.number, []).append(own)
        return {number: _roots(found) for number, found in of_piece.items()}
    gathered = exchange.gather(np.concatenate([np.empty(0), *squares]))
    for part, told in zip(exchange.parts, gathered, strict=True):
        theirs = [cut for cut in cut_fragment(part) if _merges_by_norms(cut.piece, by)]
        for cut, figures in zip(theirs, np.split(told, max(1, len(theirs))), strict=False):
            of_piece.setdefault(exchange.whole.find_piece(cut.piece), []).append(figures)
    return {
        number: _roots(of_piece[exchange.whole.find_piece(fragment.pieces[number])])
        for number in {cut.number for cut in cuts}
    }


def _roots(squares: Sequence[DoubleArray]) -> DoubleArray:
    return np.array([norm_of_cuts(column) for column in np.stack(squares).T])


def _merges_by_norms(piece: Piece, by: Any) -> bool:
    return hasattr(by, "weigh_directions") and not _merges_rows_apart(piece, by)


def square_cuts(piece: Piece, values: FloatArray) -> DoubleArray:
    """‖cut‖² of each cut of it; finite exactly when every value is."""
    each = rows_of_cut(piece)
    full, rest = divmod(piece.rows, each)
    whole = values.size // piece.rows * each * full
    found = np.empty(full + (rest > 0), np.float64)
    if full:
        kernels.square_norms(read_only(values[:whole]), found[:full])
    if rest:
        kernels.square_norms(read_only(values[whole:]), found[full:])
    return found


def norm_of_cuts(squares: DoubleArray) -> float:
    """The exact sum, rounded once: it does not depend on how the cuts are grouped."""
    return math.sqrt(math.fsum(squares))


def cut_fragment(fragment: Fragment, limits: Sequence[int] = ()) -> list[Cut]:
    """All of it, in order. `limits`: of each piece, the values that a cut of it may have; empty: a PART."""
    return [
        cut
        for number, (piece, values) in enumerate(fragment.parts)
        for cut in _cut_piece(number, piece, values, limits[number] if limits else PART)
    ]


def _cut_piece(number: int, piece: Piece, values: slice, limit: int) -> list[Cut]:
    """Into runs of rows, as many as are within the limit."""
    width, each = piece.size // piece.rows, rows_of_cut(piece, limit)
    runs = [(first, min(each, piece.rows - first)) for first in range(0, piece.rows, each)]
    return [
        Cut(
            number,
            Piece(piece.tensor, piece.first + first, count),
            slice(values.start + first * width, values.start + (first + count) * width),
            read_only(np.array([first * width])),
        )
        for first, count in runs
    ]


def rows_of_cut(piece: Piece, limit: int = PART) -> int:
    """As many as are within the limit, one at least; the last cut of a piece has the rest."""
    return max(1, limit // (piece.size // piece.rows))


def _takes_mean(piece: Piece, by: Any) -> bool:
    if piece.tensor.buffer_rule or (piece.tensor.embedding and not getattr(by, "MERGES_EMBEDDINGS", False)):
        return True
    return hasattr(by, "direction_rows") and by.direction_rows(piece) == 0


def _find_mean(number: int, piece: Piece, terms: Terms) -> BodySum | None:
    """The mean straight from the bodies. None: it is taken of what they decode to, or there is none to take."""
    if len(terms.deltas) < 2 or piece.tensor.buffer_rule == "first" or any(factor != 1 for factor in terms.factors):
        return None
    return sum_bodies(terms.deltas, number, terms.shares)


def _merges_rows_apart(piece: Piece, by: Any) -> bool:
    return _takes_mean(piece, by) or bool(by.merges_rows_apart(piece))


def _filtered_terms(
    fragment: Fragment, deltas: Sequence[ReadableDelta], weights: Sequence[float], factors: Sequence[FloatArray]
) -> list[Terms]:
    """Piece by piece: shortened by a factor below 1, without those of factor 0. What nobody gives does not move."""
    found = []
    for n in range(len(fragment.pieces)):
        all_of = zip(deltas, weights, factors, strict=True)
        kept = [(delta, weight, factor[n]) for delta, weight, factor in all_of if factor[n] * weight > 0]
        found.append(_terms(*map(list, zip(*kept, strict=True))) if kept else Terms([], [], np.empty(0)))
    return found


def _terms(
    deltas: Sequence[ReadableDelta], weights: Sequence[float], factors: Sequence[np.float32] | None = None
) -> Terms:
    """The contributions that weigh anything."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    all_of = zip(deltas, weights, factors or [np.float32(1)] * len(deltas), strict=True)
    weighed = [(delta, weight, factor) for delta, weight, factor in all_of if weight > 0]
    if not weighed:
        raise ValueError(f"nothing to merge: the weights of {len(weights)} contributions sum to 0")
    heaviest = max(weights)
    relative = np.array([weight / heaviest for _, weight, _ in weighed])
    shares = relative / math.fsum(relative)
    return Terms([delta for delta, _, _ in weighed], [factor for _, _, factor in weighed], shares)


def _merge_cut(cut: Cut, terms: Terms, out: FloatArray, by: Any, room: Room) -> None:
    if not terms.deltas:
        out[:] = 0.0
    elif len(terms.deltas) == 1 or cut.piece.tensor.buffer_rule == "first":
        cut.read(terms.deltas[:1], out[np.newaxis])
        if terms.factors[0] != 1:
            out *= terms.factors[0]
    elif _takes_mean(cut.piece, by):
        take_mean(room.read_cut(cut, *terms[:2]), terms.shares, out)
    else:
        by.merge_piece(cut.piece, room.read_cut(cut, *terms[:2]), terms.shares, out)


def merges_in_parts(rule: str) -> bool:
    """Whether shards that hold rows of a tensor each come to the bits of the whole (docs/adr/0031)."""
    rows, by = Piece(TensorSpec("rows", (2, 2), "float32"), 0, 2), MERGE.load(rule)
    return _merges_rows_apart(rows, by) or _merges_by_norms(rows, by)


def merges_rows_apart(rule: str) -> bool:
    """Whether it needs no norms of whole tensors."""
    return _merges_rows_apart(Piece(TensorSpec("rows", (2, 2), "float32"), 0, 2), MERGE.load(rule))


def merges_by_norms(rule: str, fragment: Fragment) -> bool:
    """Whether shards tell each other norms for it."""
    by = MERGE.load(rule)
    return any(_merges_by_norms(piece, by) for piece in fragment.pieces)


def subtracts_from_newest(rule: str) -> bool:
    """Whether this rule wants Δ = Θ − θ of the newest Θ."""
    return bool(getattr(MERGE.load(rule), "SUBTRACTS_FROM_NEWEST", False))


def take_mean(deltas: FloatArray, shares: DoubleArray, out: FloatArray) -> None:
    """Of deltas [contributions, values]."""
    kernels.take_mean(read_only(deltas), read_only(shares), out)


def row_norms(values: FloatArray, rows: int) -> DoubleArray:
    squares = np.empty(rows, np.float64)
    kernels.square_norms(read_only(values), squares)
    return np.sqrt(squares)


def add_scaled(deltas: Sequence[FloatArray] | FloatArray, coefficients: DoubleArray, out: FloatArray) -> None:
    """out ← Σ c Δ in the order given; coefficients by contribution, and then by row where rows have their own."""
    by_row = coefficients.reshape(len(deltas), -1).T
    given = [read_only(delta) for delta in deltas]
    for first in range(0, len(deltas), GROUP):
        group = given[first : first + GROUP]
        scales = np.zeros((len(by_row), GROUP), np.float32)
        scales[:, : len(group)] = by_row[:, first : first + GROUP]
        filled = (*group, *([group[0]] * (GROUP - len(group))))
        kernels.accumulate(out, filled, read_only(scales), len(group), first == 0)
