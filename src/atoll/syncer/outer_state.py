"""The outer state of one fragment: the slots of the outer optimizer, and with a lossy version codec the feedback.

- Feedback is what the bytes of the last version left out. It is in cuts, and cannot be had from payloads, so it starts
  at zero in every term, and behind a rollback or a reset. Behind a round of the journal it is not known.
- Arrays that a cut is written from are not written to: they are copied before the next step changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atoll.numerics.arrays import FloatArray

FEEDBACK = "feedback"
"""Beside the slots of the outer optimizer."""
FIRST = 65_536
"""Elements that are looked at together for one that is not zero: mostly the first ones have one."""


class Overflow(ValueError):
    """The outer step was not finite. It has spoiled the fragment's outer state, which is reset."""


class OuterState:
    def __init__(self, size: int, slots: Sequence[str], *, has_feedback: bool) -> None:
        """`size`: elements of the fragment; `slots`: of the outer optimizer."""
        self._size, self._has_feedback = size, has_feedback
        names = [*slots, *([FEEDBACK] if has_feedback else [])]
        self._arrays = {name: np.zeros(size, dtype=np.float32) for name in names}
        self._shared = False
        """A cut may still be written from the arrays."""
        self.knows_feedback = True
        """False: bytes of the journal were applied, and what they left out is not in them."""

    def share_arrays(self) -> Mapping[str, FloatArray]:
        """By name, as they are now, to write a cut from."""
        self._shared = True
        return self._arrays

    def own_arrays(self) -> dict[str, FloatArray]:
        """By name, to be changed: a cut that is written from them keeps those that it has."""
        if self._shared:
            self._arrays = {name: array.copy() for name, array in self._arrays.items()}
            self._shared = False
        return self._arrays

    def replace_arrays(self, arrays: Mapping[str, FloatArray]) -> None:
        """These are taken over, not copied. Feedback that is not among them starts at zero."""
        self._arrays, self._shared = dict(arrays), False
        if FEEDBACK not in arrays:
            self.set_feedback(None)
        self.knows_feedback = True

    def names(self) -> list[str]:
        return list(self._arrays)

    def packed_arrays(self) -> dict[str, FloatArray]:
        """What a rollback brings back: all but the feedback, which starts at zero behind it."""
        return {name: self._arrays[name] for name in sorted(self._arrays.keys() - {FEEDBACK})}

    def momentum(self) -> FloatArray | None:
        """The outer momentum, or the last gradient where momentum is off; None: the optimizer keeps neither, or no step
        was made."""
        momentum = self._arrays.get("momentum")
        if momentum is None:
            return None
        parts = (momentum[start : start + FIRST] for start in range(0, momentum.size, FIRST))
        return momentum if any(part.any() for part in parts) else None

    def reset_slots(self, slots: Sequence[str]) -> None:
        """Set these to zero."""
        for name in slots:
            self.own_arrays()[name].fill(0.0)

    def reset_all(self) -> None:
        """Set slots and feedback to zero: they may contain what overflowed."""
        self.reset_slots(self.names())
        self.knows_feedback = True

    def set_feedback(self, rest: FloatArray | None) -> None:
        """In an array of its own: a cut may be written from the one before. None: zero."""
        if self._has_feedback:
            self._arrays[FEEDBACK] = np.zeros(self._size, dtype=np.float32) if rest is None else rest
        self.knows_feedback = True

    def forget_feedback(self) -> None:
        """It is not known until the next term begins, or the state is reset or brought back."""
        if self._has_feedback:
            self.knows_feedback = False
