"""Two warnings: `ShareWatch`, `SameBatches`.

`ShareWatch` raises an alarm when a live learner's work is merged far less than the others'. Every H/2 of its own steps,
what was merged of a learner's last 2H steps is compared with what it computed in them. The window begins H steps after
the learner has recovered: by then as much comes out of flight as goes into it. Its rules, each with its test:

- a learner whose share is under half of the median of the others' twice in a row has its work thrown away: that is
  told once, with both figures;
- it is over, and that is told too, once its share is back at two thirds of the others', or when it is gone;
- who has not made enough steps is not judged, and neither is the only learner there is; who is muted is judged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.protocol.statistics import median, merged_share
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

LOW, RECOVERED = 1 / 2, 2 / 3
"""Of the others' share: below the one it begins, from the other on it is over."""
LOOKS_PER_H = 2
LOOKS = 2 * LOOKS_PER_H
"""In a window."""
LOW_LOOKS = 2
"""In a row, before it is told."""


@dataclass(frozen=True, slots=True)
class Look:
    """An account in fragment-tokens, after so many steps of its learner."""

    t: int
    computed: int
    merged: int


@dataclass(slots=True)
class Window:
    """The last steps of one incarnation."""

    incarnation: int
    next_t: int
    """The step at which to look next."""
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=LOOKS + 1))
    low_looks: int = 0
    alarm: str = ""
    """What was told, while it is so."""

    @property
    def share(self) -> float | None:
        """Of what was computed in the window, how much was merged; None before it is full."""
        if len(self.looks) <= LOOKS:
            return None
        first, last = self.looks[0], self.looks[-1]
        return merged_share(last.merged - first.merged, last.computed - first.computed)


class ShareWatch:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self._windows: dict[str, Window] = {}

    def alarm(self, learner: KnownLearner) -> str:
        """What is wrong with its share; empty: nothing."""
        window = self._windows.get(learner.name)
        return window.alarm if window is not None and _is_of(window, learner) else ""

    def note_report(self, learner: KnownLearner) -> None:
        """It may have made enough steps for another look."""
        self._end_of_those_gone()
        window = self._windows.get(learner.name)
        if window is None or not _is_of(window, learner):
            if learner.state == "training":
                self._windows[learner.name] = Window(learner.incarnation, learner.t + self._steps(1.0))
        elif learner.t >= window.next_t:
            self._look_at_share(learner, window)

    def _look_at_share(self, learner: KnownLearner, window: Window) -> None:
        account = self.state.history.ledger.open.get((learner.name, learner.incarnation))
        if account is None or account.origin is None:
            return
        window.next_t = learner.t + self._steps(1 / LOOKS_PER_H)
        computed = (account.total - account.origin) * len(account.merged)
        window.looks.append(Look(learner.t, computed, sum(account.merged)))
        others = self._share_of_others(learner)
        if window.share is not None and others is not None:
            self._judge_share(learner, window, window.share, others)

    def _judge_share(self, learner: KnownLearner, window: Window, share: float, others: float) -> None:
        window.low_looks = window.low_looks + 1 if share < LOW * others else 0
        if not window.alarm and window.low_looks >= LOW_LOOKS:
            window.alarm = f"only {share:.0%} of {learner.name}'s last work was merged, {others:.0%} of the others'"
            self._tell(learner, window.alarm, share, others, over=False)
        elif window.alarm and share >= RECOVERED * others:
            window.alarm = ""
            text = f"{share:.0%} of {learner.name}'s last work was merged again, {others:.0%} of the others'"
            self._tell(learner, text, share, others, over=True)

    def _tell(self, learner: KnownLearner, text: str, share: float, others: float, *, over: bool) -> None:
        self.state.out.note("low_share", text, learner, over=over, share=round(share, 4), others=round(others, 4))

    def _share_of_others(self, but: KnownLearner) -> float | None:
        windows = (
            (one, self._windows.get(one.name)) for one in self.state.members.reachable_learners() if one is not but
        )
        shares = [window.share for one, window in windows if window is not None and _is_of(window, one)]
        known = [share for share in shares if share is not None]
        return median(known) if known else None

    def _end_of_those_gone(self) -> None:
        for name in [name for name, window in self._windows.items() if window.alarm]:
            learner = self.state.members.learners[name]
            if not learner.connected or not _is_of(self._windows[name], learner):
                text = f"{name}, of whose work little was merged, is gone or has started over"
                self.state.out.note("low_share", text, learner, over=True)
                del self._windows[name]

    def _steps(self, of_h: float) -> int:
        return max(1, round(of_h * self.state.settings.sync_every))


def _is_of(window: Window, learner: KnownLearner) -> bool:
    return window.incarnation == learner.incarnation


COMMON = 3
KEPT = 64
"""The newest numbers of each learner: as far as one may be behind the other."""


class SameBatches:
    """Whether two learners train on the same batches, which makes the work of one worth nothing.

    With data of its own a learner says, every few steps, a number made of what its model was given. Rules kept here,
    each with its test: two learners that have `COMMON` different numbers in common are told of, once; a number that
    one says again and again is one number; who is gone is compared with nobody.
    """

    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self._said: dict[str, deque[int]] = {}
        self._common: dict[tuple[str, str], int] = {}

    def note_batch(self, learner: KnownLearner, number: int) -> None:
        """−1: it says nothing of its batches."""
        mine = self._said.setdefault(learner.name, deque(maxlen=KEPT))
        if number < 0 or number in mine:
            return
        mine.append(number)
        for other in self.state.members.connected_learners():
            if other is not learner and number in self._said.get(other.name, ()):
                self._count(*sorted((learner, other), key=lambda one: one.name))

    def _count(self, one: KnownLearner, other: KnownLearner) -> None:
        pair = (one.name, other.name)
        self._common[pair] = self._common.get(pair, 0) + 1
        if self._common[pair] == COMMON:
            text = (
                f"{one.name} and {other.name} train on the same batches, so one of them works for nothing: take them "
                "from learner.batches or learner.sampler, or shuffle by learner.seed"
            )
            self.state.out.note("same_batches", text, one, other=other.name)
