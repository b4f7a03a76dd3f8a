"""Many contributions into one outer gradient.

The rules are the modules of merges/. All of them keep this:
- embeddings always use the mean;
- buffers use the mean too, or (rule "first") are those of the first contribution that weighs anything;
- what the filter leaves out of a piece is as if it had not been given there; factors of 1 change no bit;
- one contribution comes out as itself, bit for bit; one of weight 0 is as if it were not there;
- sums run in float32 in the order given (the caller's: by learner id), norms in float64: equal inputs, equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.choices import MERGE
from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Fragment, Piece


def merge(
    fragment: Fragment,
    deltas: Sequence[FloatArray],
    weights: Sequence[float],
    out: FloatArray,
    rule: str,
    factors: Sequence[FloatArray] = (),
) -> None:
    """The outer gradient of one fragment into `out`, which is none of the deltas. ValueError where Σ w = 0.

    `factors`: of each contribution, per piece, what the filter (filter.py) makes of it; empty: nothing.
    """
    by = MERGE.load(rule)
    assert all(array.shape == (fragment.size,) for array in (out, *deltas)), "every array is one whole fragment"
    if any((one != 1).any() for one in factors):
        _merge_filtered(fragment, deltas, weights, out, by, factors)
        return
    given, shares = _shares(deltas, weights)
    if len(given) == 1:
        np.copyto(out, given[0])
    else:
        for piece, part in fragment.parts:
            _merge_piece(piece, [delta[part] for delta in given], shares, out[part], by)


def _merge_filtered(
    fragment: Fragment,
    deltas: Sequence[FloatArray],
    weights: Sequence[float],
    out: FloatArray,
    by: Any,
    factors: Sequence[FloatArray],
) -> None:
    """Piece by piece: shortened by a factor below 1, without those of factor 0. What nobody gives does not move."""
    if not any(factor.any() and weight > 0 for factor, weight in zip(factors, weights, strict=True)):
        raise ValueError("the filter leaves out every contribution of the round")
    for n, (piece, part) in enumerate(fragment.parts):
        all_of = zip(deltas, weights, factors, strict=True)
        kept = [(_scaled(delta[part], factor[n]), weight) for delta, weight, factor in all_of if factor[n] * weight > 0]
        if not kept:
            out[part] = 0.0
            continue
        given, shares = _shares([delta for delta, _ in kept], [weight for _, weight in kept])
        if len(given) == 1:
            np.copyto(out[part], given[0])
        else:
            _merge_piece(piece, given, shares, out[part], by)


def _scaled(values: FloatArray, factor: np.float32) -> FloatArray:
    return values if factor == 1 else values * factor


def _shares(deltas: Sequence[FloatArray], weights: Sequence[float]) -> tuple[list[FloatArray], DoubleArray]:
    """The contributions that weigh anything, and w / Σ w of each."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    weighed = [(delta, weight) for delta, weight in zip(deltas, weights, strict=True) if weight > 0]
    if not weighed:
        raise ValueError(f"nothing to merge: the weights of {len(weights)} contributions sum to 0")
    heaviest = max(weights)
    relative = np.array([weight / heaviest for _, weight in weighed])
    return [kernels.read_only(delta) for delta, _ in weighed], relative / math.fsum(relative)


def _merge_piece(piece: Piece, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray, by: Any) -> None:
    if piece.tensor.buffer_rule == "first":
        np.copyto(out, deltas[0])
    elif piece.tensor.embedding or piece.tensor.buffer_rule:
        take_mean(deltas, shares, out)
    else:
        by.merge_piece(piece, deltas, shares, out)


def take_mean(deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    add_scaled(deltas, shares[:, np.newaxis], out)


def row_norms(values: FloatArray, rows: int) -> DoubleArray:
    squares = np.empty(rows, np.float64)
    kernels.square_norms(kernels.read_only(values), squares)
    return np.sqrt(squares)


def add_scaled(deltas: list[FloatArray], coefficients: DoubleArray, out: FloatArray) -> None:
    """out ← Σ c Δ in the order given; coefficients by contribution, then row."""
    for first in range(0, len(deltas), kernels.GROUP):
        group = deltas[first : first + kernels.GROUP]
        scales = np.zeros((coefficients.shape[1], kernels.GROUP), np.float32)
        scales[:, : len(group)] = coefficients[first : first + kernels.GROUP].T
        filled = (*group, *([group[0]] * (kernels.GROUP - len(group))))
        kernels.accumulate(out, filled, kernels.read_only(scales), len(group), first == 0)
