"""What a learner may say that it trained on. Its word is weighed (w = tokens² / steps), so it has to be likely.

Rules kept here, each with its test:
- leased samples: it has never taken more than it was leased, and its place in its leases never goes back;
- tokens: a report is refused only if all three hold: by the syncer's clock it is above `MAX_RATIO` times the learner's
  usual rate and one step more; its tokens per step are above `MAX_RATIO` times the learner's usual; and above
  `MAX_RATIO` times the median of the others. After a pause, a burst, a reconnect or on a slow link the
  tokens per step stay the same, so nothing is refused; neither are larger batches that take their time, or that
  everybody has;
- a contribution's tokens per step have the same limit, unless no other learner is known, and its tokens are no more
  than the ledger says it had;
- a life of fewer than `KNOWN_STEPS` steps has no usual value of its own: its tokens per step are at most
  `MAX_RATIO_NEW` times the median of the others, if there are several. That leaves room for other hardware; below it,
  the weight limit applies (weights.py);
- a learner that declares its tokens per step when it joins is held to that: no contribution has more in its steps, and
  no report but the first of a life, which may name steps of before;
- a learner with over `REPORT_RATIO` times the tokens per step of the median of the others is reported once: it may have
  larger batches, which the operator can allow it (`weight_limits`), or claim what it has not trained on;
- without a reference (own history, or two other learners) every claim is accepted: a single other learner may be the
  one that lies.

A learner that makes up steps as well as tokens keeps its tokens per step: its weight is limited (weights.py), and what
it gives is screened like anybody's. Whoever is trusted with a credential is not expected to be that determined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_RATIO = 8.0
"""A claim above this many times the usual value is refused."""
MAX_RATIO_NEW = MAX_RATIO * MAX_RATIO
"""The same limit for a new life, which can only be compared with the other learners."""
REPORT_RATIO = 3.0
"""Above this many times the others' tokens per step, a learner is reported to the operator."""
KNOWN_STEPS = 32
"""After this many steps a life is compared with its own usual value."""


@dataclass(slots=True)
class Usual:
    """What one life has claimed so far, by the syncer's clock."""

    began_at: float | None = None
    at: float = 0.0
    """When it last reported a step …"""
    t: int = 0
    """… which was this one, …"""
    total: int = 0
    """… with so many tokens. A hello between two reports names steps, but no tokens: these belong together."""
    steps: int = 0
    tokens: int = 0

    def add(self, now: float, t: int, total: int) -> None:
        """A report that was taken in. What it had before the first is no measure of its speed."""
        if self.began_at is None:
            self.began_at = now
        elif t > self.t:
            self.steps, self.tokens = self.steps + t - self.t, self.tokens + total - self.total
        else:
            return
        self.at, self.t, self.total = now, t, total

    @property
    def known(self) -> bool:
        return self.steps >= KNOWN_STEPS and self.tokens > 0 and self.began_at is not None and self.at > self.began_at

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def per_second(self) -> float:
        assert self.began_at is not None
        return self.tokens / (self.at - self.began_at)


def beyond_lease(position: int, before: int, leased: int) -> str | None:
    """`before`: the place it named last, −1 for none."""
    if position > leased:
        return f"it says it took {position} samples, {leased} were leased to it"
    if 0 <= position < before:
        return f"its place in its leases went back from {before} to {position}"
    return None


Others = Callable[[], float | None]
"""The median of the other learners' usual tokens per step (`Membership.per_step`: None where none is known, or where
the learner is not known yet and there is only one other). Asked for only where a claim is beyond the learner's own."""


def beyond_rate(now: float, t: int, total: int, own: Usual, others: Others) -> str | None:
    """What it adds to its last report."""
    steps, tokens = t - own.t, total - own.total
    if not own.known:
        return beyond_steps(steps, tokens, own, others)
    if tokens <= own.per_step + MAX_RATIO * own.per_second * (now - own.at):
        return None
    if (wrong := beyond_steps(steps, tokens, own, others)) is None:
        return None
    usual = own.per_second * (now - own.at)
    return f"{tokens} tokens in {now - own.at:.3g} s, where {usual:.3g} are usual: {wrong}"


def beyond_steps(steps: int, tokens: int, own: Usual, others: Others) -> str | None:
    """Whether so many tokens in so many steps are out of all proportion, to its own usual and to everybody's."""
    per_step, measure = tokens / max(1, steps), own.per_step if own.known else 0.0
    ratio = MAX_RATIO if own.known else MAX_RATIO_NEW
    if per_step <= ratio * measure:
        return None
    if (usual := others()) is not None:
        measure = max(measure, usual)
    elif not own.known:
        return None
    if per_step <= ratio * measure:
        return None
    return f"{per_step:.4g} tokens per step, where {measure:.4g} are usual"


def beyond_declared(steps: int, tokens: int, declared: int) -> str | None:
    """Whether so many steps can have so many tokens; `declared`: of one step at most, 0 for not at all."""
    if not declared or tokens <= declared * max(1, steps):
        return None
    return f"{tokens} tokens in {max(1, steps)} steps, where {declared} per step were declared when it joined"


def above_others(per_step: float, others: float | None) -> str | None:
    """Whether its steps have far more tokens than those of the others; `others`: their median, if there are several."""
    if others is None or per_step <= REPORT_RATIO * others:
        return None
    return f"{per_step:.4g} tokens per step, {per_step / others:.3g} times the median of the others"
