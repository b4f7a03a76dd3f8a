"""What a relay makes of its members' contributions, and how the syncer merges that with the others.

Rules of directions (rda and its kin) average norms and directions apart: (Σ w‖Δ‖ / Σ w) · φ(Σ w φ(Δ) / Σ w), row by
row. Both sums can be made in parts. Of the members of a group, with W = Σ w, a relay sends for each row

    radius R = Σ w‖Δ‖ / W           and the direction, as long as a Δ usually is:   B = R · Σ w φ(Δ) / W

and the syncer adds up over groups, a contribution of its own being a group of one with R = ‖Δ‖ and B = Δ:

    radius = Σ W R / Σ W            direction = Σ W (B / R) / Σ W            outer gradient = radius · φ(direction)

B is in the units of Δ, so that what a codec leaves out of it this time can be added to it the next time. Where the mean
is taken (rule mean, embeddings), B = Σ w Δ / W and there are no radii: the syncer takes the mean of the means.

A row whose directions cancel is merged by the mean, and whether they cancel is known only of all groups together: then
the syncer asks for the means of those rows (`mean_rows`), in fp32, and puts them in (`place_means`).

The result is that of the flat merge (merge.py) to rounding. Buffers are not summed, and neither are rules that look at
each contribution: `why_not_summed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from atoll.choices import MERGE
from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.fragments import Fragment, FragmentPlan, Piece
from atoll.numerics.kernels import CANCELLED, SPECK
from atoll.numerics.merge import add_scaled, row_norms, subtracts_from_newest

T = TypeVar("T")


class GroupTerm(NamedTuple):
    """What one relay gives to a merge, or one learner."""

    values: FloatArray
    weight: float
    radii: FloatArray | None = None
    """Of every row that has a direction; None: it is one learner's contribution."""


class DirectionRow(NamedTuple):
    """A row whose norm and direction are merged apart; its values in the fragment's array."""

    start: int
    stop: int


def why_not_summed(rule: str, plan: FragmentPlan, *, robust: bool, moments: bool) -> str:
    """Why contributions to this run are passed on one by one; empty: relays sum them."""
    if robust:
        return "robust compares contributions with each other"
    if moments:
        return "moments travel behind every contribution"
    if subtracts_from_newest(rule) or not hasattr(MERGE.load(rule), "direction_rows"):
        return f"the merge rule {rule} needs each contribution"
    if any(part.buffers.stop for part in plan.fragments):
        return "the model's merged buffers need each contribution"
    return ""


def count_rows(rule: str, fragment: Fragment) -> int:
    """Rows of a fragment that have a direction."""
    return sum(_rows_of(rule, piece) for piece in fragment.pieces)


def sum_group(
    rule: str,
    fragment: Fragment,
    deltas: Sequence[FloatArray],
    weights: Sequence[float],
    out: FloatArray,
    threads: int = 1,
) -> FloatArray:
    """B into `out`; the radii. ValueError where nobody weighs anything."""
    weighed, shares = _weighed(deltas, weights)
    radii = np.zeros(count_rows(rule, fragment), np.float64)

    def work(first: int, last: int) -> None:
        for _, values, rows in _parts(rule, fragment)[first:last]:
            some = [read_only(delta[values]) for delta in weighed]
            if rows.stop == rows.start:
                add_scaled(some, shares, out[values])
            else:
                norms = np.stack([row_norms(delta, rows.stop - rows.start) for delta in some])
                radii[rows] = _add_directions(some, norms, shares, out[values])

    in_parts(work, len(fragment.pieces), 1, threads)
    return radii.astype(np.float32)


def merge_groups(
    rule: str, fragment: Fragment, terms: Sequence[GroupTerm], out: FloatArray, threads: int = 1
) -> list[int]:
    """The outer gradient into `out`, but for the rows that are returned: their directions cancel, and `place_means`
    puts their means in. ValueError where nobody weighs anything."""
    weighed, shares = _weighed(terms, [term.weight for term in terms])
    if len(weighed) == 1 and weighed[0].radii is None:
        np.copyto(out, weighed[0].values)
        return []
    cancelled = np.zeros(count_rows(rule, fragment), np.bool_)

    def work(first: int, last: int) -> None:
        for _, values, rows in _parts(rule, fragment)[first:last]:
            some, count = [read_only(term.values[values]) for term in weighed], rows.stop - rows.start
            if not count:
                add_scaled(some, shares, out[values])
                continue
            pairs = zip(weighed, some, strict=True)
            norms = np.stack([row_norms(own, count) if t.radii is None else _double(t.radii[rows]) for t, own in pairs])
            radius = _add_directions(some, norms, shares, out[values])
            length = row_norms(out[values], count)
            cancelled[rows] = length < CANCELLED * radius
            factors = np.divide(radius, length, out=np.ones(count), where=length > 0)
            kernels.scale_rows(out[values], read_only(factors.astype(np.float32)))

    in_parts(work, len(fragment.pieces), 1, threads)
    return [int(row) for row in np.flatnonzero(cancelled)]


def mean_rows(
    rule: str, fragment: Fragment, rows: Sequence[int], deltas: Sequence[FloatArray], weights: Sequence[float]
) -> FloatArray:
    """Σ w Δ / Σ w of these rows, one behind the other."""
    weighed, shares = _weighed(deltas, weights)
    found = [_mean([delta[at.start : at.stop] for delta in weighed], shares) for at in find_rows(rule, fragment, rows)]
    return np.concatenate(found) if found else np.empty(0, np.float32)


def place_means(
    rule: str,
    fragment: Fragment,
    rows: Sequence[int],
    terms: Sequence[GroupTerm],
    means: Sequence[FloatArray | None],
    out: FloatArray,
) -> None:
    """The mean of these rows into `out`. `means`: of every group, what `mean_rows` gave; None: of a contribution."""
    both, shares = _weighed(list(zip(terms, means, strict=True)), [term.weight for term in terms])
    start = 0
    for at in find_rows(rule, fragment, rows):
        width = at.stop - at.start
        own = [term.values[at.start : at.stop] if mean is None else mean[start : start + width] for term, mean in both]
        out[at.start : at.stop] = _mean(own, shares)
        start += width


def find_rows(rule: str, fragment: Fragment, rows: Sequence[int]) -> list[DirectionRow]:
    """Where these rows are. ValueError: there is no such row."""
    if any(not 0 <= row < count_rows(rule, fragment) for row in rows):
        raise ValueError(f"a row is asked for that fragment {fragment.index} does not have")
    found, wanted = [], iter(sorted(set(rows)))
    row = next(wanted, None)
    for piece, values, held in _parts(rule, fragment):
        width = piece.size // max(1, held.stop - held.start)
        while row is not None and row < held.stop:
            start = values.start + (row - held.start) * width
            found.append(DirectionRow(start, start + width))
            row = next(wanted, None)
    return found


# ---- parts ----------------------------------------------------------------------------------------------------------


def _rows_of(rule: str, piece: Piece) -> int:
    by = MERGE.load(rule)
    if piece.tensor.embedding and not getattr(by, "MERGES_EMBEDDINGS", False):
        return 0
    rows: int = by.direction_rows(piece)
    return rows


def _parts(rule: str, fragment: Fragment) -> list[tuple[Piece, slice, slice]]:
    """Each piece, its values, and its rows among all that have a direction."""
    found, row = [], 0
    for piece, values in fragment.parts:
        rows = _rows_of(rule, piece)
        found.append((piece, values, slice(row, row + rows)))
        row += rows
    return found


def _weighed(given: Sequence[T], weights: Sequence[float]) -> tuple[list[T], DoubleArray]:
    """Those that weigh anything, and w / Σ w of each, as merge.py makes them."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    kept = [(one, weight) for one, weight in zip(given, weights, strict=True) if weight > 0]
    if not kept:
        raise ValueError(f"nothing to merge: the weights of {len(weights)} contributions sum to 0")
    heaviest = max(weight for _, weight in kept)
    relative = np.array([weight / heaviest for _, weight in kept])
    return [one for one, _ in kept], relative / math.fsum(relative)


def _add_directions(values: list[FloatArray], norms: DoubleArray, shares: DoubleArray, out: FloatArray) -> DoubleArray:
    """radius · Σ share φ(values) into `out`; the radius of each row. The norm of values without a direction is 0."""
    radius: DoubleArray = np.zeros(norms.shape[1], np.float64)
    for share, norm in zip(shares, norms, strict=True):
        radius += share * norm
    toward = np.divide(radius, norms, out=np.zeros_like(norms), where=norms > SPECK * radius)
    add_scaled(values, shares[:, np.newaxis] * toward, out)
    return radius


def _double(radii: FloatArray) -> DoubleArray:
    return radii.astype(np.float64)


def _mean(rows: Sequence[FloatArray], shares: DoubleArray) -> FloatArray:
    total = np.zeros(rows[0].size, np.float32)
    for share, row in zip(shares, rows, strict=True):
        total += np.float32(share) * row
    return total
