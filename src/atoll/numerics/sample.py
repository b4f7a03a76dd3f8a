"""A sample of a fragment's values: of every piece, whole blocks, drawn by a seed.

Rules kept here: equal seeds draw equal blocks; every value of a fragment is in some samples; a piece gives as large a
share as the others, a block at least; a small fragment is taken whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.numerics.arrays import FloatArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.deltas import DecodedDelta, ReadableDelta, read_whole
from atoll.numerics.fragments import Fragment, FragmentPlan

BLOCK = 1024
"""Values that lie side by side: fewer would cost nearly as much to read as all."""
ONE_IN = 16
LEAST = 1 << 18
"""Values, of the whole fragment: the cosine of two unrelated samples is 0.002 then, honest ones are 0.05 or more."""


class Blocks(NamedTuple):
    """What is taken of one piece."""

    start: int
    """The value of the fragment at which block 0 begins."""
    size: int
    """Values in a block."""
    total: int
    """Blocks of the piece."""
    drawn: NDArray[np.int64]
    """The numbers of those that are taken."""


class Sample(NamedTuple):
    parts: list[slice]
    """Where the values of each piece lie in what `take` gives."""
    blocks: list[Blocks]
    """Of each piece; empty: all is taken."""

    @property
    def size(self) -> int:
        return int(self.parts[-1].stop)

    def read(self, delta: ReadableDelta, threads: int = 1) -> FloatArray:
        """The same of a contribution, of which only so much is decoded."""
        if not self.blocks or isinstance(delta, DecodedDelta):
            return self.take(read_whole(delta, threads))
        taken = np.empty(self.size, np.float32)

        def work(first: int, last: int) -> None:
            for number in range(first, last):
                start, size, _, drawn = self.blocks[number]
                starts = read_only(start - delta.fragment.offsets[number] + size * drawn)
                delta.read_runs(number, starts, taken[self.parts[number]])

        in_parts(work, len(self.blocks), 1, threads)
        return taken

    def take(self, values: FloatArray) -> FloatArray:
        """Of a whole fragment's values; they themselves where all is taken."""
        if not self.blocks:
            return values
        taken = np.empty(self.size, np.float32)
        for part, (start, size, total, drawn) in zip(self.parts, self.blocks, strict=True):
            source = values[start : start + total * size].reshape(total, size)
            np.take(source, drawn, axis=0, out=taken[part].reshape(-1, size), mode="clip")
        return taken


def take_all(fragment: Fragment) -> Sample:
    return Sample([part for _, part in fragment.parts], [])


def draw_sample(fragment: Fragment, seed: Sequence[int]) -> Sample:
    if fragment.size <= 2 * LEAST:
        return take_all(fragment)
    dice, share = np.random.default_rng(seed), max(1 / ONE_IN, LEAST / fragment.size)
    blocks = [_draw_blocks(part, share, dice) for _, part in fragment.parts]
    edges = accumulate((one.size * len(one.drawn) for one in blocks), initial=0)
    return Sample([slice(*edge) for edge in pairwise(edges)], blocks)


def _draw_blocks(part: slice, share: float, dice: np.random.Generator) -> Blocks:
    """Blocks begin at the piece's first value or end at its last one: half of the time each."""
    values = part.stop - part.start
    size = min(BLOCK, values)
    total = values // size
    start = part.start + int(dice.integers(2)) * (values - total * size)
    drawn = np.sort(dice.choice(total, math.ceil(share * total), replace=False))
    return Blocks(start, size, total, drawn)


def largest_sample(plan: FragmentPlan) -> int:
    """Values that a sample of these fragments copies at most: every seed draws as many."""
    drawn = [draw_sample(fragment, [0]) for fragment in plan.fragments]
    return max((one.size for one in drawn if one.blocks), default=0)
