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
- with a codec that keeps feedback a body also brings what earlier ones left out, so the body of one step may be as
  large as theirs. It is judged as if it had as many steps as the longest of the recently merged contributions to the
  fragment. What counts as usual, once it is merged, is its norm by its own steps;
- only merged contributions count: nobody can shift what is usual by sending what is refused anyway.

This stops broken numbers, not a determined insider.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.numerics.compiled import read_only
from atoll.numerics.fragments import FragmentPlan

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
    """Per fragment, the steps of the contributions that had these norms; none without feedback."""


class NormScreen:
    def __init__(
        self,
        plan: FragmentPlan | Sequence[int],
        limit: float = 10.0,
        window: int = 64,
        least: int = 8,
        most_steps: int = 1 << 40,
        feedback: bool = False,
    ) -> None:
        """A plan, or the sizes of its fragments. `least` norms are accepted before norms are judged. `feedback`:
        bodies also hold what earlier ones left out."""
        self._sizes = [fragment.size for fragment in plan.fragments] if isinstance(plan, FragmentPlan) else list(plan)
        self._buffers = [part.buffers for part in plan.fragments] if isinstance(plan, FragmentPlan) else []
        buffered = [part.stop - part.start for part in self._buffers] or [0] * len(self._sizes)
        self._counts = [size - count for size, count in zip(self._sizes, buffered, strict=True)]
        """Per fragment, the values that its norm is of: all but buffers."""
        self.limit = limit
        self._least, self.most_steps = least, most_steps
        self._norms: list[deque[float]] = [deque(maxlen=window) for _ in self._sizes]
        self._steps: list[deque[int]] = [deque(maxlen=window if feedback else 0) for _ in self._sizes]
        """Per fragment, the steps of the contributions that had these norms: the feedback may be of as many."""
        self._highest = [0.0] * len(self._sizes)
        """Per fragment, the highest running median so far."""
        self._least_buffers = [math.inf] * len(self._sizes)
        """Per fragment, the least norm of its committed buffers since norms are judged: nobody raises it bit by bit."""
        self._waiting: dict[Hashable, tuple[int, float, int]] = {}
        """Norms that passed and are not merged yet: fragment, norm per step, steps."""

    def judge(
        self,
        fragment: int,
        delta: FloatArray,
        steps: int = 1,
        key: Hashable = None,
        committed: FloatArray | None = None,
    ) -> str | None:
        """Why this contribution is refused, or None. Its norm counts after `note_merged`; without a key, at once.
        `committed`: the fragment's values that it was made on; None: others, so its buffers are not merged."""
        if not 0 <= fragment < len(self._sizes):
            return f"fragment {fragment} is not one of the plan's {len(self._sizes)}"
        if delta.shape != (self._sizes[fragment],):
            return f"{delta.size} values came, fragment {fragment} has {self._sizes[fragment]}"
        norm, broken = measure_delta(delta)
        if broken:
            return broken
        if self._buffers and (buffers := self._buffers[fragment]).stop > 0:
            refusal = None if committed is None else self._judge_buffers(fragment, committed[buffers], delta[buffers])
            if refusal is not None:
                return refusal
            norm = math.hypot(_norm(delta[: buffers.start]), _norm(delta[buffers.stop :]))
        return self.judge_measured(fragment, norm, steps, key)

    def judge_measured(self, fragment: int, norm: float, steps: int, key: Hashable) -> str | None:
        """The same of a contribution without buffers that somebody else has measured (`measure_delta`)."""
        own = min(max(steps, 1), self.most_steps)
        held = max([own, *self._steps[fragment]])
        refusal = self._judge_norm(fragment, norm / held, "norm" if held == 1 else "norm per step")
        if refusal is None:
            self._waiting[key] = (fragment, norm / own, own)
            if key is None:
                self.note_merged(key)
        return refusal

    def note_merged(self, key: Hashable) -> None:
        """The contribution of this key goes into a version."""
        if (found := self._waiting.pop(key, None)) is not None:
            fragment, norm, steps = found
            self._norms[fragment].append(norm)
            self._steps[fragment].append(steps)
            if len(self._norms[fragment]) >= self._least:
                self._highest[fragment] = max(self._highest[fragment], median(self._norms[fragment]))

    def usual_norms(self) -> UsualNorms:
        return UsualNorms([*map(list, self._norms)], list(self._highest), [*map(list, self._steps)])

    def restore_norms(self, known: UsualNorms) -> None:
        """Take over those of an earlier term; those of another plan, or broken ones, are ignored."""
        rows = [*known.recent, known.highest]
        sound = all(math.isfinite(norm) and norm >= 0 for row in rows for norm in row)
        if len(known.recent) == len(known.highest) == len(self._norms) and sound:
            self._highest = list(known.highest)
            for kept, row in zip(self._norms, known.recent, strict=True):
                kept.extend(row)
            for held, steps in zip(self._steps, known.steps, strict=False):  # an earlier syncer kept none
                held.extend(min(one, self.most_steps) for one in steps)

    def forget_norm(self, key: Hashable) -> None:
        """The contribution of this key is discarded, or merged already."""
        self._waiting.pop(key, None)

    def _judge_buffers(self, fragment: int, committed: FloatArray, delta: FloatArray) -> str | None:
        if len(self._norms[fragment]) < self._least:
            return None
        least = self._least_buffers[fragment] = min(self._least_buffers[fragment], _norm(committed))
        usual, norm = max(1.0, least), _norm(committed - delta)
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
        own = median(self._norms[fragment])
        if len(self._norms[fragment]) >= self._least:
            return own
        pairs = zip(self._norms, self._counts, strict=True)
        per_value = max(
            median(norms) / math.sqrt(max(1, count)) for norms, count in pairs if len(norms) >= min(EARLY, self._least)
        )
        return max(own, per_value * math.sqrt(self._counts[fragment]))


def measure_delta(delta: FloatArray) -> tuple[float, str]:
    """Its norm, and why it is refused whatever is usual; empty: it is not."""
    norm = _norm(delta)
    return (norm, "") if math.isfinite(norm) else (0.0, f"{_broken(delta)} of {delta.size} values are not finite")


def _norm(values: FloatArray) -> float:
    """Finite exactly when every value is: one pass answers both questions."""
    square = np.empty(1, np.float64)
    kernels.square_norms(read_only(values), square)
    return math.sqrt(square[0])


def _broken(values: FloatArray) -> int:
    parts = (values[start : start + CHUNK] for start in range(0, values.size, CHUNK))
    return sum(part.size - int(np.count_nonzero(np.isfinite(part))) for part in parts)
