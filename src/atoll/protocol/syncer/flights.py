"""How many rounds may be under way (between freezing and commit).

There is to be one round per H/P learner steps. If a round takes nine steps from freezing to commit, nine of them have
to be under way for that. The syncer measures what a round takes and lets as many rounds start as are needed
(`schedule.needed_flights`): at least ⌈max(1, τ)·P/H⌉, above that at most P − 1, within the memory that the settings
allow. A void round that waits for its turn counts as well.

More rounds under way help only as long as they do not wait for each other. Where a link, the merging or the disk is
too slow, each of n rounds takes n times as long, as many are committed as with one, and all that has changed is that
every contribution is older. So an increase is a trial: it stays if rounds were committed faster with it (`GAIN`), else
it is taken back, fewer are tried, and the next increase comes later. That is how bandwidth that is missing is told from
latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol import schedule
from atoll.protocol.statistics import Average
from atoll.protocol.syncer.state import Round, SyncerState

GAIN = 0.25
"""The least gain of a trial: a quarter of what it would gain if no round waited for another."""
BEHIND, FAR_BEHIND = 1.03, 1.5
"""Rounds are behind the pace if a commit takes so many times H/P steps."""
SAME = 1.05
"""Fewer rounds under way do as well if commits are at most so many times as far apart."""
DEVIATIONS = 2.0
"""Rounds that take so many mean deviations longer than the average start on time as well."""
FEW, MANY = 4, 24
"""Commits behind a judgement, at least: where rounds are far behind the pace, and otherwise."""
HOLD = 4
"""Judgements until an increase is tried again, after one that gained nothing; twice as many each time, up to …"""
LONGEST_HOLD = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """Another number of rounds, which has to show what it brings."""

    before: int
    gap_s: float
    """Between two commits, before it."""


class Flights:
    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.needed = schedule.least_flights(state.settings)
        """Rounds needed to keep the pace."""
        self.wanted = self.needed
        """Rounds that measurably help."""
        self.bodies: dict[str, int] = {}
        """The size of a contribution, by codec; empty: not known."""
        self.contribution_bytes = self.budget_bytes = 0
        """Memory that one contribution under way takes in the syncer (0: not known, no limit), and all of them may."""
        self.is_short = False
        """Rounds are committed more slowly than one per H/P steps, and more of them under way would not help."""
        self.gap_s: float | None = None
        """From commit to commit, when rounds were last behind the pace."""
        self.round_s = Average()
        """From freezing to commit …"""
        self.merging_s = Average()
        """… and the part of it after the last answer came and its turn had: merging, and the disk."""
        self._deviation_s = Average()
        self._trial: Trial | None = None
        self._counted = 0
        self._since = (0.0, 0.0)
        """The moment and the step at which counting began."""
        self._held_back = False
        """A round that was due had to wait since then."""
        self._hold, self._next_hold = 0, HOLD
        """Judgements until the next increase is tried; and how many after the next that gains nothing."""
        self._enough = self.wanted
        """While more rounds do not help: the smallest number not yet shown to be slower."""

    def start_anew(self) -> None:
        """H or τ are others: what is needed is measured again."""
        self.needed = self.wanted = self._enough = schedule.least_flights(self._state.settings)
        self._trial, self._counted, self._hold, self._next_hold = None, 0, 0, HOLD
        self.is_short = False

    @property
    def affordable(self) -> int:
        """By the memory that the settings allow."""
        learners = len(self._state.members.stepping_learners())
        return schedule.affordable_flights(self.budget_bytes, self.contribution_bytes, learners, self._state.settings)

    @property
    def allowed(self) -> int:
        return min(self.wanted, self.affordable)

    @property
    def lacks_memory(self) -> bool:
        """More rounds would be under way if the settings allowed them more memory."""
        return self.affordable < self.needed

    def hold_back(self) -> None:
        """A round that could freeze waits for one under way."""
        self._held_back = True

    def note_commit(self, now: float, step: float, round_: Round) -> None:
        """A round was committed: measure it, and judge the number once enough were. `step`: of the pace clock."""
        settings, step_s = self._state.settings, self._state.members.step_s()
        if settings.synchronous or self._state.draining or round_.attempt > 1 or step_s is None:
            return
        taken_s = max(0.0, now - round_.frozen_at)
        self._deviation_s.add(0.0 if self.round_s.value is None else abs(taken_s - self.round_s.value))
        self.round_s.add(taken_s)
        self.merging_s.add(now - round_.merging_at)
        self._counted += 1
        count, first = self._counted, self.allowed  # the first ones began under the number before: they do not count
        if count == first:
            self._since, self._held_back = (now, step), False
        elif count >= first + FEW:
            gap_s, gap_steps = (now - self._since[0]) / (count - first), (step - self._since[1]) / (count - first)
            late = gap_steps / schedule.interval(settings)
            if count >= first + max(MANY, first) or (late > FAR_BEHIND and count >= 2 * first):
                self._judge(gap_s, step_s, behind=late > BEHIND)
                self._counted = 0

    def _judge(self, gap_s: float, step_s: float, *, behind: bool) -> None:
        assert self.round_s.value is not None and self._deviation_s.value is not None
        usual_s = self.round_s.value + DEVIATIONS * self._deviation_s.value
        self.needed = schedule.needed_flights(usual_s, step_s, self._state.settings)
        better, trial = min(self.needed, self.affordable), self._trial
        self._trial = None
        if not behind:
            self.is_short, self._hold, self._next_hold = False, 0, HOLD
            self._enough = schedule.least_flights(self._state.settings)
            self.wanted -= better < self.wanted
            return
        self.gap_s = gap_s
        if trial is not None:
            self._judge_trial(trial, gap_s)
        if self._hold == 0 and self._held_back and better > self.wanted:
            self._try(better, gap_s)
            return
        self._hold = max(0, self._hold - 1)
        self.is_short = self.is_short or self.needed == schedule.most_flights(self._state.settings)
        if self.is_short and self.wanted > self._enough:
            self._try(max(self._enough, self.wanted // 2), gap_s)

    def _try(self, count: int, gap_s: float) -> None:
        self._trial, self.wanted = Trial(self.wanted, gap_s), count

    def _judge_trial(self, trial: Trial, gap_s: float) -> None:
        """Whether more were of use, or fewer did as well. If not, it is as it was before."""
        if self.wanted < trial.before:
            if gap_s > SAME * trial.gap_s:
                self.wanted = self._enough = trial.before
            return
        gained, fully = trial.gap_s / gap_s - 1, self.wanted / trial.before - 1
        self.is_short = gained < GAIN * fully
        if self.is_short:
            self.wanted = trial.before
            self._hold, self._next_hold = self._next_hold, min(LONGEST_HOLD, 2 * self._next_hold)
