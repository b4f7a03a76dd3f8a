"""Many contributions into one outer gradient.

    mean       Σ w Δ / Σ w
    rda        per tensor: (Σ w‖Δ‖ / Σ w) · φ(Σ w φ(Δ)),  φ(x) = x/‖x‖, φ(0) = 0
    rda-row    the same per row (first dimension) of tensors that have rows

Rules kept here:
- embeddings always use the mean; so does whatever has no common direction, because the directions cancel;
- buffers use the mean too, or (rule "first") are those of the first contribution that weighs anything;
- what the filter leaves out of a tensor is as if it had not been given there; factors of 1 change no bit;
- one contribution comes out as itself, bit for bit; one of weight 0 is as if it were not there;
- sums run in float32 in the order given (the caller's: by learner id), norms in float64: equal inputs, equal bits.

Learners' outer gradients are nearly orthogonal, so a mean shrinks like 1/√M; RDA keeps their norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.fragments import Fragment, elements
from atoll.protocol.messages import TensorSpec

RULES = ("mean", "rda", "rda-row")
CANCELLED = 1e-3
"""Directions whose mean is shorter than this cancel: M unrelated ones are 1/√M long, float32 noise about 1e-7."""
SPECK = 1e-30
"""A norm this small beside the mean norm has no direction: scaling it up would leave the range of float32."""


def weigh(tokens: int, steps: int) -> float:
    """w = tokens · (tokens / steps): quantity × quality."""
    return tokens * tokens / steps if steps > 0 else 0.0


def merge(
    fragment: Fragment,
    deltas: Sequence[FloatArray],
    weights: Sequence[float],
    out: FloatArray,
    rule: str,
    factors: Sequence[FloatArray] = (),
) -> None:
    """The outer gradient of one fragment into `out`, which is none of the deltas. ValueError where Σ w = 0.

    `factors`: of each contribution, per tensor, what the filter (filter.py) makes of it; empty: nothing.
    """
    if rule not in RULES:
        raise ValueError(f"merge rule {rule!r} is not known: use one of {', '.join(RULES)}")
    assert all(array.shape == (fragment.size,) for array in (out, *deltas)), "every array is one whole fragment"
    if any((one != 1).any() for one in factors):
        _merge_filtered(fragment, deltas, weights, out, rule, factors)
        return
    given, shares = _shares(deltas, weights)
    if len(given) == 1:
        np.copyto(out, given[0])
    elif rule == "mean" and not any(tensor.buffer_rule == "first" for tensor in fragment.tensors):
        _mean(given, shares, out)
    else:
        for tensor, start in zip(fragment.tensors, fragment.offsets, strict=True):
            part = slice(start, start + elements(tensor))
            _merge_tensor(tensor, [delta[part] for delta in given], shares, out[part], rule)


def _merge_filtered(
    fragment: Fragment,
    deltas: Sequence[FloatArray],
    weights: Sequence[float],
    out: FloatArray,
    rule: str,
    factors: Sequence[FloatArray],
) -> None:
    """Tensor by tensor: shortened by a factor below 1, without those of factor 0. What nobody gives does not move."""
    if not any(factor.any() and weight > 0 for factor, weight in zip(factors, weights, strict=True)):
        raise ValueError("the filter leaves out every contribution of the round")
    for n, (tensor, start) in enumerate(zip(fragment.tensors, fragment.offsets, strict=True)):
        part = slice(start, start + elements(tensor))
        all_of = zip(deltas, weights, factors, strict=True)
        kept = [(_scaled(delta[part], factor[n]), weight) for delta, weight, factor in all_of if factor[n] * weight > 0]
        if not kept:
            out[part] = 0.0
            continue
        given, shares = _shares([delta for delta, _ in kept], [weight for _, weight in kept])
        if len(given) == 1:
            np.copyto(out[part], given[0])
        else:
            _merge_tensor(tensor, given, shares, out[part], rule)


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


def _merge_tensor(
    tensor: TensorSpec, deltas: list[FloatArray], shares: DoubleArray, out: FloatArray, rule: str
) -> None:
    if tensor.buffer_rule == "first":
        np.copyto(out, deltas[0])
    elif tensor.embedding or tensor.buffer_rule or rule == "mean":
        _mean(deltas, shares, out)
    else:
        rows = tensor.shape[0] if rule == "rda-row" and len(tensor.shape) >= 2 else 1
        _radial_directional(deltas, shares, out, rows)


def _mean(deltas: list[FloatArray], shares: DoubleArray, out: FloatArray) -> None:
    _sum(deltas, shares[:, np.newaxis], out)


def _radial_directional(deltas: list[FloatArray], shares: DoubleArray, out: FloatArray, rows: int) -> None:
    """Row by row: the mean norm, times the direction of the mean direction."""
    norms = np.stack([_norms(delta, rows) for delta in deltas])
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    toward = np.divide(radius, norms, out=np.zeros_like(norms), where=norms > SPECK * radius)
    coefficients = shares[:, np.newaxis] * toward  # of Δ in radius · Σ w φ(Δ) / Σ w, which is about as large as a Δ
    _sum(deltas, coefficients, out)
    length = _norms(out, rows)
    cancelled = length < CANCELLED * radius
    if cancelled.any():
        _sum(deltas, np.where(cancelled, shares[:, np.newaxis], coefficients), out)
    factors = np.divide(radius, length, out=np.ones(rows), where=(length > 0) & ~cancelled)
    kernels.scale_rows(out, kernels.read_only(factors.astype(np.float32)))


def _norms(values: FloatArray, rows: int) -> DoubleArray:
    squares = np.empty(rows, np.float64)
    kernels.square_norms(kernels.read_only(values), squares)
    return np.sqrt(squares)


def _sum(deltas: list[FloatArray], coefficients: DoubleArray, out: FloatArray) -> None:
    """out ← Σ c Δ in the order given; coefficients by contribution, then row."""
    for first in range(0, len(deltas), kernels.GROUP):
        group = deltas[first : first + kernels.GROUP]
        scales = np.zeros((coefficients.shape[1], kernels.GROUP), np.float32)
        scales[:, : len(group)] = coefficients[first : first + kernels.GROUP].T
        filled = (*group, *([group[0]] * (kernels.GROUP - len(group))))
        kernels.accumulate(out, filled, kernels.read_only(scales), len(group), first == 0)
