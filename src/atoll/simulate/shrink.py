"""Fewer faults that break the same promise: delta debugging, in a fixed order and with a bound on the runs it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
MOST_RUNS = 150


def shrink(things: Sequence[T], fails: Callable[[Sequence[T]], bool], most_runs: int = MOST_RUNS) -> list[T]:
    """A part of these that still fails, none of which can be left out alone (unless the runs ran out)."""
    left, pieces, runs = list(things), 2, 0
    while left:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            fewer = [*left[:start], *left[start + size :]]
            runs += 1
            if runs > most_runs:
                return left
            if fails(fewer):
                left, pieces = fewer, max(2, pieces - 1)
                break
        else:
            if size == 1:
                return left
            pieces = min(len(left), 2 * pieces)
    return left
