"""Three warnings: `ShareWatch`, `SameBatches`, `NotFiniteWatch`.

`ShareWatch` raises an alarm when a live learner's work is merged far less than the others'. Every H/2 of its own steps,
what was merged during a learner's last 2H steps is compared with what was merged or dropped during them: the same work
on both sides, so that a share is at most 1 however unevenly rounds come. Where neither happened, all of its work waits,
and its share is 0. The window begins H steps after the learner has recovered. Its rules, each with its test:

- a learner whose share is under half of the median of the others' twice in a row, and for `LOW_S` seconds, has its work
  thrown away: that is told once, with both figures and what to do;
- it is over, and that is told too, once its share is back at two thirds of the others', or when it is gone;
- who has not made enough steps is not judged, and neither is the only learner there is; who is muted is judged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.protocol.statistics import merged_share
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

LOW, RECOVERED = 1 / 2, 2 / 3
"""Of the others' share: below the one it begins, from the other on it is over."""
LOOKS_PER_H = 2
LOOKS = 2 * LOOKS_PER_H
"""In a window."""
LOW_LOOKS = 2
"""In a row, before it is told …"""
LOW_S = 30.0
"""… and so long since the first of them: where steps take milliseconds, two looks are no time."""


@dataclass(frozen=True, slots=True)
class Look:
    """An account in fragment-tokens, after so many steps of its learner."""

    computed: int
    merged: int
    dropped: int


@dataclass(slots=True)
class Window:
    """The last steps of one incarnation."""

    incarnation: int
    next_t: int
    """The step at which to look next."""
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=LOOKS + 1))
    low_looks: int = 0
    low_since: float = 0.0
    alarm: str = ""
    """What was told, while it is so."""

    @property
    def share(self) -> float | None:
        """Of what was merged or dropped in the window, how much was merged; None before it is full."""
        if len(self.looks) <= LOOKS:
            return None
        first, last = self.looks[0], self.looks[-1]
        merged = last.merged - first.merged
        settled = merged + last.dropped - first.dropped
        return merged_share(merged, settled or last.computed - first.computed)


class ShareWatch:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self._windows: dict[str, Window] = {}
        self._low: set[str] = set()
        """Whose windows have an alarm."""

    def alarm(self, learner: KnownLearner) -> str:
        """What is wrong with its share; empty: nothing."""
        window = self._windows.get(learner.name)
        return window.alarm if window is not None and _is_of(window, learner) else ""

    def note_report(self, now: float, learner: KnownLearner) -> None:
        """It may have made enough steps for another look."""
        self._end_of_those_gone()
        window = self._windows.get(learner.name)
        if window is None or not _is_of(window, learner):
            if learner.state == "training":
                self._windows[learner.name] = Window(learner.incarnation, learner.t + self._steps(1.0))
        elif learner.t >= window.next_t:
            self._look_at_share(now, learner, window)

    def _look_at_share(self, now: float, learner: KnownLearner, window: Window) -> None:
        account = self.state.history.ledger.open.get((learner.name, learner.incarnation))
        if account is None or account.origin is None:
            return
        window.next_t = learner.t + self._steps(1 / LOOKS_PER_H)
        computed = (account.total - account.origin) * len(account.merged)
        window.looks.append(Look(computed, sum(account.merged), sum(account.dropped)))
        learner.merged_share = window.share
        self.state.members.update_medians(learner)
        if not window.alarm and window.share is not None and window.share >= LOW:
            window.low_looks = 0  # whatever the others' share is
            return
        others = self.state.members.merged_share_of_others(learner)
        if window.share is not None and others is not None:
            self._judge_share(now, learner, window, window.share, others)

    def _judge_share(self, now: float, learner: KnownLearner, window: Window, share: float, others: float) -> None:
        window.low_looks = window.low_looks + 1 if share < LOW * others else 0
        if window.low_looks == 1:
            window.low_since = now
        shares = f"{_percent(share)} of {learner.name}'s last work was merged"
        if not window.alarm and window.low_looks >= LOW_LOOKS and now >= window.low_since + LOW_S:
            window.alarm = f"only {shares}, {_percent(others)} of the others'"
            self._low.add(learner.name)
            self._tell(learner, f"{window.alarm}: {self._what_to_do()}", share, others, over=False)
        elif window.alarm and share >= RECOVERED * others:
            window.alarm = ""
            self._low.discard(learner.name)
            self._tell(learner, f"{shares} again, {_percent(others)} of the others'", share, others, over=True)

    def _what_to_do(self) -> str:
        larger = f"a larger sync_every (now {self.state.settings.sync_every}) gives it more time for a round"
        if self.state.settings.adopt == "carry":
            return f"atoll status shows whether it is slow or cut off; {larger}"
        return f"atoll status shows whether it is slow or cut off; adopt=carry keeps its work, and {larger}"

    def _tell(self, learner: KnownLearner, text: str, share: float, others: float, *, over: bool) -> None:
        self.state.out.note("low_share", text, learner, over=over, share=round(share, 4), others=round(others, 4))

    def _end_of_those_gone(self) -> None:
        for name in sorted(self._low):
            learner = self.state.members.learners[name]
            if not learner.connected or not _is_of(self._windows[name], learner):
                text = f"{name}, of whose work little was merged, is gone or has started over"
                self.state.out.note("low_share", text, learner, over=True)
                del self._windows[name]
                learner.merged_share = None
                self.state.members.update_medians(learner)
                self._low.discard(name)

    def _steps(self, of_h: float) -> int:
        return max(1, round(of_h * self.state.settings.sync_every))


def _percent(share: float) -> str:
    """Rounded down: nearly all is not all."""
    return f"{int(100 * share)} %"


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
        self._who: dict[int, set[str]] = {}
        """Per number, the learners that said it of late."""
        self._common: dict[tuple[str, str], int] = {}

    def note_batch(self, learner: KnownLearner, number: int) -> None:
        """−1: it says nothing of its batches."""
        mine = self._said.setdefault(learner.name, deque(maxlen=KEPT))
        if number < 0 or number in mine:
            return
        if len(mine) == KEPT:
            self._forget(mine[0], learner.name)
        mine.append(number)
        who = self._who.setdefault(number, set())
        for other in [self.state.members.learners[name] for name in sorted(who)]:
            if other.connected:
                self._count(*sorted((learner, other), key=lambda one: one.name))
        who.add(learner.name)

    def _forget(self, number: int, name: str) -> None:
        self._who[number].discard(name)
        if not self._who[number]:
            del self._who[number]

    def _count(self, one: KnownLearner, other: KnownLearner) -> None:
        pair = (one.name, other.name)
        self._common[pair] = self._common.get(pair, 0) + 1
        if self._common[pair] == COMMON:
            text = (
                "shuffle by learner.seed, or take batches from learner.batches or learner.sampler: "
                f"{one.name} and {other.name} train on the same batches, so one of them works for nothing"
            )
            self.state.out.note("same_batches", text, one, other=other.name)


NOT_FINITE = "not finite"
"""In the reason of a refusal: what screening says of such numbers."""
QUARANTINES = 2
"""In a row: its numbers broke again after it took the run's parameters and another inner optimizer."""


class NotFiniteWatch:
    """Whether the run as a whole diverges: a learner alone recovers from the others, all of them together cannot.

    Rules kept here, each with its test: when every learner that is there went into quarantine `QUARANTINES` times
    since it was sound, for numbers that are not finite, an alarm says so, once; it is over when each of them is sound
    again, or gone. A learner is sound once P contributions in a row were accepted: one fragment may hold running
    statistics alone, which stay finite in a model that is lost.
    """

    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self._quarantines: dict[str, int] = {}
        """By learner, since it was sound."""
        self._accepted: dict[str, int] = {}
        """By learner with a quarantine, contributions since then."""
        self._alarmed = False

    def note_quarantine(self, learner: KnownLearner, reason: str) -> None:
        if NOT_FINITE not in reason:
            return
        self._quarantines[learner.name] = self._quarantines.get(learner.name, 0) + 1
        self._accepted[learner.name] = 0
        there = self.state.members.connected_learners()
        if self._alarmed or any(self._quarantines.get(one.name, 0) < QUARANTINES for one in there):
            return
        self._alarmed = True
        text = "the numbers of every learner are not finite: look at the data or lower the learning rate"
        self.state.out.note("alarm", text, over=False, about="numbers")

    def note_accepted(self, learner: KnownLearner) -> None:
        if learner.name not in self._quarantines:
            return
        self._accepted[learner.name] += 1
        if self._accepted[learner.name] < self.state.settings.fragments:
            return
        del self._quarantines[learner.name], self._accepted[learner.name]
        if not self._alarmed:
            return
        if not any(one.name in self._quarantines for one in self.state.members.connected_learners()):
            self._alarmed = False
            self._quarantines.clear()
            self._accepted.clear()
            self.state.out.note("alarm", "the numbers of the learners are finite again", over=True, about="numbers")
