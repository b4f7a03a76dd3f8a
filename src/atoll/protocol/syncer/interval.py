"""How far apart rounds are, how many may be under way, and which share of them each learner takes part in.

One round per H/P learner steps is what is asked. What can be had is measured: every learner reports how many bytes per
second its way up and its way down carry, and the syncer measures its own merges and its disk. From that follow, without
trials:

- **The interval.** The longest of H/P steps, of (overlap + 1)/P steps with an H below P, of the time that the narrower
  way of the median learner needs for one round's body, and of the time of merge and disk. What a part needs is kept in
  seconds (`Pace.free_at`): the steps of a learner vary, what a link carries does not. Rounds that follow each other
  more slowly than their bodies pass do not queue, so a contribution is hardly older than its way is long.
- **The rounds under way**: as many as start while one of them, without waiting for others, is between freezing and
  commit; within the memory that the settings allow.
- **The shares.** A learner whose ways are narrower than those of the median learner takes part in so many rounds as its
  ways carry (`schedule.has_turn`). Of two in the middle the wider one sets the pace, so what one learner claims of its
  own link moves no other learner's rounds by more than `NEAR`.

The syncer's own link needs no figure of its own: all bodies of a round pass it together, so each learner measures its
part of it. Synchronous runs and the last cycle keep their schedule; there the interval is only told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor
from operator import lt

from atoll.protocol import schedule
from atoll.protocol.messages import RoundShare
from atoll.protocol.statistics import median
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import Round, SyncerState

HEADROOM = 1.04
"""Interval over the time that the narrowest part needs: measurements are never exact."""
DRAIN, MOST_DRAIN = 0.25, 1.0
"""Share by which the interval grows for each version that queues at the median learner, and its limit: a queue that
formed while the link was narrower than it had been measured drains within a cycle."""
NEAR = 1.15
"""A learner whose ways need up to so many times the median's takes part in every round, and the pace follows it: the
measurements of equal links differ by as much."""
EIGHTHS = 8
"""Shares are multiples of 1/8: a share that followed every measurement would never let a learner know its rounds."""
RISES_AT = 1.05
"""A share becomes larger again once the ways carry so much more than it takes."""
WORTH_TELLING = 0.2
"""Change of H that people are told of."""
COMMITS = 24
"""Commits whose quickest says how long a round takes that waits for no other."""
MERGES, FIRST_MERGES = 5, 3
"""Commits whose median says how long merge and disk take, and how many there have to be: a disk that stands still once,
or the first use of a kernel, does not space the rounds."""
LEAST_RATE = 1.0
"""Bytes per second. A learner that claims less counts as this: the times that follow from its claim stay finite."""
MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Narrowest:
    """The part that rounds cannot follow each other faster than."""

    part: str
    """The part by name, as people read it: "way down of site-2", "merge and disk"."""
    seconds: float
    """Seconds that one round takes of it."""
    nbytes: float = 0.0
    """Bytes of one round that pass it; 0: the part is no link."""
    ways_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that one round takes of the learner's way up and of its way down; 0: not measured, or no link."""

    def describe(self, interval_s: float) -> str:
        """Say how much of the part is used: "way down of site-2: 58 of 60 Mbit/s"."""
        if not self.nbytes:
            return f"{self.part}: {self.seconds:.3g} of every {interval_s:.3g} s"
        used, carried = self.nbytes / interval_s / MBIT, self.nbytes / self.seconds / MBIT
        return f"{self.part}: {used:.3g} of {carried:.3g} Mbit/s"


class RoundInterval:
    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.asked_steps = schedule.interval(state.settings)
        """Steps from one round to the next, if every part carries so many."""
        self.carried_s = 0.0
        """Seconds from one round to the next that the narrowest part needs; 0: H/P steps are longer."""
        self.narrowest: Narrowest | None = None
        """Part that makes the interval longer than H/P steps; None: no part does."""
        self.bodies: dict[str, int] = {}
        """Bytes of a contribution to the largest fragment, by codec; empty: not known."""
        self.up_bytes = self.down_bytes = 0.0
        """Bytes of a contribution and of a version, averaged over the fragments; 0: not known."""
        self.contribution_bytes = self.budget_bytes = 0
        """Memory of one contribution under way in the syncer (0: not known, no limit), and of all together at most."""
        self.needed = schedule.least_flights(state.settings)
        """Rounds under way that keep the interval."""
        self._merges_s: deque[float] = deque(maxlen=MERGES)
        """Seconds from the last answer to the commit, once it is the round's turn: merge and disk."""
        self._told_h = float(state.settings.sync_every)
        self._round_s: deque[float] = deque(maxlen=COMMITS)
        """Seconds from freezing to commit."""
        self._near_s = 0.0
        """Ways that need no more than this for one round set the pace: their learners take part in every round."""

    def start_anew(self) -> None:
        """H, τ or adoption have changed: what links carry has not, but rounds under way were those of another H."""
        self.asked_steps = schedule.interval(self._state.settings)
        self.needed = schedule.least_flights(self._state.settings)
        self._told_h = float(self._state.settings.sync_every)
        self._round_s.clear()

    # ---- rounds under way ---------------------------------------------------------------------------------------

    @property
    def affordable(self) -> int:
        """Rounds under way by the memory that the settings allow."""
        learners = len(self._state.members.stepping_learners())
        return schedule.affordable_flights(self.budget_bytes, self.contribution_bytes, learners, self._state.settings)

    @property
    def allowed(self) -> int:
        return min(self.needed, self.affordable)

    @property
    def lacks_memory(self) -> bool:
        """Whether more rounds would be under way if the settings allowed them more memory."""
        return self.affordable < self.needed

    # ---- the interval -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> float:
        """Steps from one round to the next."""
        step_s = self._state.members.step_s()
        return max(self.asked_steps, self.carried_s / step_s) if step_s else self.asked_steps

    def note_commit(self, now: float, round_: Round, overlap: float | None) -> None:
        """Measure a round that was committed, and space the next ones. `overlap`: the 95th percentile of the last two
        cycles."""
        settings, step_s = self._state.settings, self._state.members.step_s()
        if self._state.draining or round_.attempt > 1 or not step_s:  # 0: all reports so far came in one burst
            return
        self._round_s.append(max(0.0, now - round_.frozen_at))
        self._merges_s.append(now - round_.merging_at)
        asked = max(schedule.interval(settings), self._interval_by_overlap(overlap))
        asked_s = asked * step_s
        self.narrowest = self._find_narrowest()
        carried_s = HEADROOM * self.narrowest.seconds if self.narrowest is not None else 0.0
        if carried_s <= asked_s:
            self.narrowest = None
        if settings.synchronous:
            return
        interval_s = max(asked_s, carried_s)
        self._tell(interval_s, step_s)
        drained_s = carried_s * (1 + self._drain_share(interval_s, step_s))
        self.asked_steps, self.carried_s = asked, drained_s if drained_s > asked_s else 0.0
        # One more than fit into the time of a round: one is due at the moment at which the oldest commits.
        needed = ceil(min(self._round_s) / interval_s) + 1
        self.needed = max(1, min(needed, schedule.most_flights(settings)))
        self._set_shares(interval_s)

    def _interval_by_overlap(self, overlap: float | None) -> float:
        """A fragment is read again only after its last version was adopted, so it can be synced once in overlap + 1
        steps: with a small H a round that came earlier would find hardly any learner ready. However long versions take,
        there is a round per step, or as many as with the H of the last phase."""
        settings = self._state.settings
        last = settings.phases[-1].sync_every if settings.phases else settings.sync_every
        assert last is not None, "phases are resolved"
        most = max(last, settings.fragments)
        if overlap is None or settings.sync_every >= most or settings.synchronous:
            return 0.0
        return min(overlap + 1, most) / settings.fragments

    def _tell(self, interval_s: float, step_s: float) -> None:
        """Tell people of an H that differs much from the one they were told last, and which part makes it so."""
        fragments, asked_h = self._state.settings.fragments, self._state.settings.sync_every
        h = interval_s / step_s * fragments
        if abs(h - self._told_h) < WORTH_TELLING * self._told_h:
            return
        self._told_h = h
        narrowest = self.narrowest.describe(interval_s) if self.narrowest else ""
        text = f"H is {h:.3g}, {asked_h} was asked: {narrowest}" if narrowest else f"H is {h:.3g}"
        part = self.narrowest.part if self.narrowest else ""
        self._state.out.note("pace", text, h=round(h, 3), asked=asked_h, part=part, narrowest=narrowest)

    def _drain_share(self, interval_s: float, step_s: float) -> float:
        """Share by which the interval grows so that versions which queue at the median learner drain. Those that are on
        their way, or wait for the next boundary, do not queue."""
        queues = []
        for learner in self._state.members.stepping_learners():
            way_s = _seconds_of(self.down_bytes, learner.down_rates)
            if way_s and learner.share == 1.0 and learner.versions:
                lacking = sum(map(lt, learner.versions, self._state.versions))
                queues.append(lacking - ceil((way_s + step_s) / interval_s) - 1)
        queue = sorted(queues)[(len(queues) - 1) // 2] if queues else 0
        return min(MOST_DRAIN, DRAIN * max(0, queue))

    def _find_narrowest(self) -> Narrowest | None:
        merge_s = median(self._merges_s) if len(self._merges_s) >= FIRST_MERGES else 0.0
        merge = Narrowest("merge and disk", merge_s)
        ways = sorted((self._narrower_way(one) for one in self._state.members.stepping_learners()), key=_seconds)
        if not ways:
            return merge
        middle_s = ways[(len(ways) - 1) // 2].seconds  # of two in the middle, the wider one
        self._near_s = NEAR * middle_s
        near = [way for way in ways if way.seconds <= self._near_s]
        return max(merge, near[-1], key=_seconds)

    def _narrower_way(self, learner: KnownLearner) -> Narrowest:
        """The learner's way that takes longer for one round; 0 seconds if nothing was measured yet."""
        up_s, down_s = _seconds_of(self.up_bytes, learner.up_rates), _seconds_of(self.down_bytes, learner.down_rates)
        if up_s > down_s:
            return Narrowest(f"way up of {learner.name}", up_s, self.up_bytes, (up_s, down_s))
        return Narrowest(f"way down of {learner.name}", down_s, self.down_bytes, (up_s, down_s))

    def lead_s(self, learner: KnownLearner) -> float:
        """Seconds before a round in which a learner with a share has to be asked for its contribution."""
        up_s = _seconds_of(self.up_bytes, learner.up_rates)
        return max(up_s, learner.answer_s.value or 0.0) + (learner.step_s.value or 0.0)

    # ---- shares -------------------------------------------------------------------------------------------------

    def describe_way(self, learner: KnownLearner) -> str:
        """Name the way that a learner's share follows and what it carries: "way down 15 Mbit/s"."""
        way = self._narrower_way(learner)
        if not way.seconds:
            return ""
        return f"{way.part.removesuffix(f' of {learner.name}')} {way.nbytes / way.seconds / MBIT:.3g} Mbit/s"

    def _set_shares(self, interval_s: float) -> None:
        least = 1 / self._state.settings.fragments
        for learner in self._state.members.stepping_learners():
            way = self._narrower_way(learner)
            carried = interval_s / (HEADROOM * way.seconds) if way.seconds else 1.0
            share = 1.0 if way.seconds <= self._near_s else _round_share(carried, least)
            if share > learner.share and way.seconds > self._near_s:
                share = max(learner.share, _round_share(carried / RISES_AT, least))
            if share != learner.share:
                learner.share = share
                reason = _describe_share(share, way, interval_s)
                self._state.out.send(learner.name, RoundShare(share=share, reason=reason))
                self._state.out.note("share", f"{learner.name}: {reason}", learner, share=share)


def _seconds_of(nbytes: float, rates: tuple[float, float]) -> float:
    """Seconds that a body takes on a way of which each stretch has a rate; 0: the stretch was not measured."""
    return max((nbytes / max(LEAST_RATE, rate) for rate in rates if rate > 0), default=0.0)


def _seconds(part: Narrowest) -> float:
    return part.seconds


def _round_share(carried: float, least: float) -> float:
    """Share of the rounds for a link that carries so many of them: 1, so many eighths, or 1/n below 1/8."""
    if carried >= 1 / HEADROOM:
        return 1.0
    if carried >= 1 / EIGHTHS:
        return floor(EIGHTHS * carried) / EIGHTHS
    return max(least, 1 / ceil(1 / carried))


def _describe_share(share: float, way: Narrowest, interval_s: float) -> str:
    if share == 1.0:
        return "its link carries every round again"
    return f"{way.part} carries {way.nbytes / way.seconds / MBIT:.3g} Mbit/s, every round takes " + (
        f"{way.nbytes / interval_s / MBIT:.3g}: it takes part in {100 * share:.0f} % of the rounds"
    )
