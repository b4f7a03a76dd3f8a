"""A broken promise, by the name of the invariant that it breaks."""

from __future__ import annotations


class Violation(AssertionError):
    def __init__(self, invariant: str, message: str, learner: str = "", fragment: int = -1) -> None:
        """`learner` and `fragment`: whose story tells how it came about."""
        super().__init__(f"{invariant}: {message}")
        self.invariant, self.message, self.learner, self.fragment = invariant, message, learner, fragment
