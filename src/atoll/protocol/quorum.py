"""When a round may freeze its members: enough learners, and the grace window over or everybody there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    close: bool
    reason: str
    """Shown in the events and on the screen, asserted in tests."""
    until: float | None = None
    """When the answer may change by itself; None: only by an event."""


def effective_quorum(quorum: int, live: int, waited_s: float, patience_s: float) -> int:
    """K, or after a patience as many as can be had: max(1, min(K, live))."""
    return quorum if waited_s < patience_s else max(1, min(quorum, live))


def judge(now: float, *, ready: int, live: int, quorum: int, grace_ends: float | None) -> Verdict:
    """Whether a round may freeze its members now. `grace_ends` is None while the round is not due by its pace."""
    if ready < quorum:
        return Verdict(False, f"{ready} of {quorum} learners reported")
    if grace_ends is None:
        return Verdict(False, "not due yet: the pace keeps H")
    if ready >= live:
        return Verdict(True, f"all {live} live learners reported")
    if now < grace_ends:
        return Verdict(False, f"grace window open for {grace_ends - now:.3f} s", until=grace_ends)
    return Verdict(True, f"grace window over with {ready} of {live}")


def judge_all(*, ready: int, awaited: int) -> Verdict:
    """The synchronous rule: every learner that was live when the round opened and still is."""
    if ready == 0 or awaited > 0:
        return Verdict(False, f"{ready} of {ready + awaited} learners reported")
    return Verdict(True, f"all {ready} learners reported (synchronous)")
