"""Refuses contributions whose numbers are broken or absurd.

Rules kept here:
- what is not finite, not of the fragment's length, or far above the usual norm is refused, with the reason as one line;
- usual is the running median of the merged norms of the same fragment. Before there are enough of them (a learning rate
  that warms up makes the first ones tiny) only norms far beyond the limit are refused; and what is usual, for each
  value, in the fragment that moves most is usual here too: parameters in front of a matrix that starts at zero have no
  gradient in the first step, and all that learners give later would be refused;
- up to twice what was usual earlier in the run is never refused: near a loss of zero norms are tiny, and a hard batch
  or an inner optimizer that starts afresh makes them as large as they once were;
- model buffers have no usual pace: statistics move far at first, and hardly at all later. Once norms are judged, what
  is above a million times the least norm that the fragment's committed buffers had since then is refused;
- norms are compared per inner step, because a learner that was disconnected for a while has more steps to give. Steps
  are the learner's own claim: no more than `most_steps` of them count;
- the norm of n steps grows as n only while all steps go the same way: as √n where they are random, and hardly at all
  where they only move about. So a contribution of fewer steps than usual, such as a learner's last step, is judged as
  if it had the median number of steps of the recently merged contributions to the fragment: it may be as large as any
  of them. With a codec that keeps feedback a body also brings what earlier ones left out, so there it is judged by the
  longest of them. What counts as usual, once it is merged, is its norm by its own steps;
- only merged contributions count: nobody can shift what is usual by sending what is refused anyway;
- a norm is the root of the exact sum of the squares of the fragment's cuts (`MeasuredPart`), each of which is summed
  apart. So a verdict does not depend on which shard of the syncer (docs/adr/0031) has which of them.

This stops broken numbers, not a determined insider.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import DoubleArray, FloatArray
from atoll.numerics.compiled import in_parts, read_only
from atoll.numerics.deltas import GivenDelta, as_readable, read_whole
from atoll.numerics.fragments import Fragment, FragmentPlan, whole
from atoll.numerics.merge import Room, cut_fragment, square_cuts
from atoll.protocol.messages import TensorSpec

EARLY = 4
"""Norms that must be known before any is refused."""
EARLY_LIMIT = 100.0
"""Times the limit, before there are enough norms."""
HONEST = 10.0
"""A norm up to so many times the limit may be sound work: its refusal names the setting that lets it in."""
ONCE_USUAL = 2.0
"""Times the highest running median of the run: so much is accepted, however small norms have become."""
BUFFER_LIMIT = 1e6
"""Times the norm of a fragment's buffers, at least 1: those of dead channels fall to nothing and may come back."""
CHUNK = 65_536
"""Elements looked at together when those that are not finite are counted."""


class UsualNorms(msgspec.Struct, frozen=True):
    """What a screen knows, for the next term."""

    recent: list[list[float]] = []
    """Per fragment, the norms whose median is usual."""
    highest: list[float] = []
    """Per fragment, the highest of these medians so far."""
    steps: list[list[int]] = []
    """Per fragment, the steps of the contributions that had these norms."""


class MeasuredPart(NamedTuple):
    """A contribution to a fragment, or the part of it that a shard holds. Squares are one for each cut, in order."""

    size: int
    squares: DoubleArray
    """‖Δ‖², without buffers."""
    broken: int = 0
    """Values that are not finite, buffers' too."""
    committed: DoubleArray | None = None
    """‖Θ‖² of its buffers; None: it was made on another version."""
    moved: DoubleArray | None = None
    """‖Θ − Δ‖² of them."""


def measure_part(
    part: Fragment, delta: GivenDelta, committed: FloatArray | None = None, threads: int = 1
) -> MeasuredPart:
    """`committed`: the values that it was made on; None: others, so its buffers are not merged. One cut after the other
    is decoded and measured."""
    given, cuts, room = as_readable(part, delta), cut_fragment(part), Room()
    squares, held, moved = (np.zeros(len(cuts)) for _ in range(3))

    def work(first: int, last: int) -> None:
        for at, cut in enumerate(cuts[first:last], start=first):
            values = room.read_cut(cut, [given])[0]
            squares[at] = square_cuts(cut.piece, values)[0]
            if cut.piece.tensor.buffer_rule and committed is not None:
                held[at] = square_cuts(cut.piece, committed[cut.values])[0]
                moved[at] = square_cuts(cut.piece, committed[cut.values] - values)[0]

    in_parts(work, len(cuts), 1, threads)
    buffers = np.array([bool(cut.piece.tensor.buffer_rule) for cut in cuts], np.bool_)
    broken = 0 if np.isfinite(squares).all() else _broken(read_whole(given, threads))
    known = (held[buffers], moved[buffers]) if committed is not None else (None, None)
    return MeasuredPart(part.size, squares[~buffers], broken, *known)


class RunningMedian:
    """Of the newest figures. They are kept in order: their number grows with that of the learners."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._figures: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._figures)

    def add(self, figure: float) -> None:
        self._figures.append(figure)
        insort(self._ordered, figure)
        if len(self._figures) > self._most:
            del self._ordered[bisect_left(self._ordered, self._figures.popleft())]

    def list_figures(self) -> list[float]:
        return list(self._figures)

    @property
    def median(self) -> float:
        return (self.lower_median + self._ordered[len(self._ordered) // 2]) / 2

    @property
    def lower_median(self) -> float:
        return self._ordered[(len(self._ordered) - 1) // 2]

    @property
    def highest(self) -> float:
        return self._ordered[-1]


class NormScreen:
    def __init__(
        self,
        plan: FragmentPlan | Sequence[int],
        limit: float = 10.0,
        window: int = 64,
        least: int = 8,
        most_steps: int = 1 << 40,
        feedback: bool = False,
        threads: int = 1,
    ) -> None:
        """A plan, or the sizes of its fragments. `least` norms are accepted before norms are judged. `feedback`:
        bodies also hold what earlier ones left out."""
        self._threads = threads
        self._sizes = [fragment.size for fragment in plan.fragments] if isinstance(plan, FragmentPlan) else list(plan)
        self._plan = plan if isinstance(plan, FragmentPlan) else None
        buffers = [part.buffers for part in plan.fragments] if isinstance(plan, FragmentPlan) else []
        buffered = [part.stop - part.start for part in buffers] or [0] * len(self._sizes)
        self._counts = [size - count for size, count in zip(self._sizes, buffered, strict=True)]
        """Per fragment, the values that its norm is of: all but buffers."""
        self.limit = limit
        self._least, self.most_steps = least, most_steps
        self._norms = [RunningMedian(window) for _ in self._sizes]
        self._steps = [RunningMedian(window) for _ in self._sizes]
        """Per fragment, the steps of the contributions that had these norms."""
        self._feedback = feedback
        self._highest = [0.0] * len(self._sizes)
        """Per fragment, the highest running median so far."""
        self._least_buffers = [math.inf] * len(self._sizes)
        """Per fragment, the least norm of its committed buffers since norms are judged: nobody raises it bit by bit."""
        self._waiting: dict[Hashable, tuple[int, float, int]] = {}
        """Norms that passed and are not merged yet: fragment, norm per step, steps."""

    def judge(
        self,
        fragment: int,
        delta: GivenDelta,
        steps: int = 1,
        key: Hashable = None,
        committed: FloatArray | None = None,
    ) -> str | None:
        """Why this contribution is refused, or None. Its norm counts after `note_merged`; without a key, at once.
        `committed`: the fragment's values that it was made on; None: others, so its buffers are not merged."""
        size = delta.size if isinstance(delta, np.ndarray) else delta.fragment.size
        if (refusal := self._refuse_size(fragment, size)) is not None:
            return refusal
        part = self._plan.fragments[fragment] if self._plan is not None else whole_array(size)
        return self.judge_parts(fragment, [measure_part(part, delta, committed, self._threads)], steps, key)

    def judge_parts(
        self, fragment: int, parts: Sequence[MeasuredPart], steps: int = 1, key: Hashable = None
    ) -> str | None:
        """The same for one that was measured, in the order of its parts."""
        size = sum(part.size for part in parts)
        if (refusal := self._refuse_size(fragment, size)) is not None:
            return refusal
        if broken := sum(part.broken for part in parts):
            return f"{broken} of {size} values are not finite"
        norm = _root_of_sum([part.squares for part in parts])
        if self._plan is not None and self._plan.fragments[fragment].buffers.stop > 0:
            before = [part.committed for part in parts if part.committed is not None]
            after = [part.moved for part in parts if part.moved is not None]
            if len(before) == len(parts):
                refusal = self._judge_buffers(fragment, _root_of_sum(before), _root_of_sum(after))
            if refusal is not None:
                return refusal
        return self.judge_measured(fragment, norm, steps, key)

    def judge_measured(self, fragment: int, norm: float, steps: int, key: Hashable) -> str | None:
        """The same of a contribution without buffers that somebody else has measured (`measure_delta`)."""
        own = min(max(steps, 1), self.most_steps)
        held = max(own, self._find_steps_held(self._steps[fragment]))
        refusal = self._judge_norm(fragment, norm / held, "norm" if held == 1 else "norm per step")
        if refusal is None:
            self._waiting[key] = (fragment, norm / own, own)
            if key is None:
                self.note_merged(key)
        return refusal

    def _find_steps_held(self, merged: RunningMedian) -> int:
        """How many steps a contribution with fewer of its own may hold."""
        if not len(merged):
            return 1
        return int(merged.highest if self._feedback else merged.lower_median)

    def note_merged(self, key: Hashable) -> None:
        """The contribution of this key goes into a version."""
        if (found := self._waiting.pop(key, None)) is not None:
            fragment, norm, steps = found
            self._norms[fragment].add(norm)
            self._steps[fragment].add(steps)
            if len(self._norms[fragment]) >= self._least:
                self._highest[fragment] = max(self._highest[fragment], self._norms[fragment].median)

    def usual_norms(self) -> UsualNorms:
        steps = [[int(count) for count in merged.list_figures()] for merged in self._steps]
        return UsualNorms([merged.list_figures() for merged in self._norms], list(self._highest), steps)

    def restore_norms(self, known: UsualNorms) -> None:
        """Take over those of an earlier term; those of another plan, or broken ones, are ignored."""
        rows = [*known.recent, known.highest]
        sound = all(math.isfinite(norm) and norm >= 0 for row in rows for norm in row)
        if len(known.recent) == len(known.highest) == len(self._norms) and sound:
            self._highest = list(known.highest)
            for kept, row in zip(self._norms, known.recent, strict=True):
                for norm in row:
                    kept.add(norm)
            for held, steps in zip(self._steps, known.steps, strict=False):  # an earlier syncer kept none
                for count in steps:
                    held.add(min(count, self.most_steps))

    def forget_norm(self, key: Hashable) -> None:
        """The contribution of this key is discarded, or merged already."""
        self._waiting.pop(key, None)

    def _refuse_size(self, fragment: int, size: int) -> str | None:
        if not 0 <= fragment < len(self._sizes):
            return f"fragment {fragment} is not one of the plan's {len(self._sizes)}"
        if size != self._sizes[fragment]:
            return f"{size} values came, fragment {fragment} has {self._sizes[fragment]}"
        return None

    def _judge_buffers(self, fragment: int, committed: float, norm: float) -> str | None:
        """`committed`: the norm of the buffers as they are; `norm`: as they would be."""
        if len(self._norms[fragment]) < self._least:
            return None
        least = self._least_buffers[fragment] = min(self._least_buffers[fragment], committed)
        usual = max(1.0, least)
        if norm <= BUFFER_LIMIT * usual:
            return None
        return f"the norm of its buffers is {norm:.3g}, over {BUFFER_LIMIT:,.0f} times the run's {usual:.3g}"

    def _judge_norm(self, fragment: int, norm: float, called: str) -> str | None:
        known = len(self._norms[fragment])
        usual = self._find_usual(fragment) if known >= min(EARLY, self._least) else 0.0
        limit = self.limit if known >= self._least else EARLY_LIMIT * self.limit
        if usual == 0.0 or norm <= max(limit * usual, ONCE_USUAL * self._highest[fragment]):
            return None
        ratio = norm / usual
        told = f"{called} {norm:.3g} is {ratio:.3g} times the running median {usual:.3g} (limit {limit:g})"
        if ratio > HONEST * limit:
            return told
        higher = math.ceil(2 * self.limit * ratio / limit)
        return f"{told}; if its learning rate rose: atoll set RUN norm_limit={higher}"

    def _find_usual(self, fragment: int) -> float:
        own = self._norms[fragment].median
        if len(self._norms[fragment]) >= self._least:
            return own
        pairs = zip(self._norms, self._counts, strict=True)
        per_value = max(
            norms.median / math.sqrt(max(1, count)) for norms, count in pairs if len(norms) >= min(EARLY, self._least)
        )
        return max(own, per_value * math.sqrt(self._counts[fragment]))


def whole_array(size: int) -> Fragment:
    """Of a plan that is not known: one row."""
    return Fragment(0, (whole(TensorSpec("", (1, size), "float32")),), (0,), size)


def _root_of_sum(squares: Sequence[DoubleArray]) -> float:
    """The exact sum, however it is dealt out."""
    return math.sqrt(math.fsum(value for part in squares for value in part.tolist()))


def measure_delta(delta: FloatArray) -> tuple[float, str]:
    """Its norm, and why it is refused whatever is usual; empty: it is not."""
    square = np.empty(1, np.float64)
    kernels.square_norms(read_only(delta), square)  # finite exactly when every value is
    if not math.isfinite(square[0]):
        return 0.0, f"{_broken(delta)} of {delta.size} values are not finite"
    return math.sqrt(square[0]), ""


def _broken(values: FloatArray) -> int:
    parts = (values[start : start + CHUNK] for start in range(0, values.size, CHUNK))
    return sum(part.size - int(np.count_nonzero(np.isfinite(part))) for part in parts)
