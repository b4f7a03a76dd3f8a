"""Interval between rounds, number of rounds under way, and the share of the rounds that each learner takes part in.

The settings ask for one round per H/P learner steps. Whether links, merge and disk carry as many is measured: every
learner reports how many bytes per second its way up and its way down carry, and the syncer measures its merges and its
disk. Three figures are computed from that at every commit:

- **The interval**, the longest of: H/P steps; (overlap + 1)/P steps, if H is below P or below the H of the last phase;
  the time that the narrower way of the median learner needs for the body of one round; the time of merge and disk. A
  link needs the same seconds for a body however long a step takes, so these times are kept in seconds
  (`Pace.free_at`). Rounds that follow each other more slowly than their bodies pass do not queue, so a contribution is
  hardly older than its way is long.
- **The rounds under way**: as many as start while the quickest of the last rounds was between freezing and commit, and
  one more; within the memory that the settings allow.
- **The shares.** A learner whose ways are narrower than those of the median learner takes part in as many rounds as its
  ways carry (`schedule.has_turn`). Of two learners in the middle, the one with the wider way sets the pace. So a single
  learner's claim about its own link changes the interval of the others by at most the factor `NEAR`.

The syncer's own link needs no figure of its own: all bodies of a round pass it together, so each learner measures its
part of it. Synchronous runs and the last cycle keep their schedule; there the narrowest part is only reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor, inf
from operator import lt

from atoll.protocol import schedule
from atoll.protocol.messages import RoundShare
from atoll.protocol.statistics import median
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import Round, SyncerState

HEADROOM = 1.04
"""Factor from the time that the narrowest part needs to the interval, because measurements are never exact."""
DRAIN = 0.25
"""Share by which the interval grows for each version that queues at the median learner, up to twice the interval. A
queue forms while a link is narrower than was measured before; with this share it drains within a cycle."""
NEAR = 1.15
"""Largest ratio of a learner's time per round to the median learner's at which the learner takes part in every round.
The pace then follows its link. The measurements of equal links differ by as much."""
EIGHTHS = 8
"""Shares are multiples of 1/8. A share that followed every measurement would change at every commit, and with it the
rounds in which the learner has a turn."""
RISES_AT = 1.05
"""Ratio of what a learner's ways carry to what a larger share takes, from which on it gets the larger share."""
RISES_AFTER = 2
"""Cycles of P commits in which a learner's ways have to carry a larger share before it gets it. A rate that moves about
with the load of a machine would else change the share, and tell so, several times in a second."""
MEASURED_AFTER = 5
"""Commits in which they have to carry it if all learners have a share, or if rounds have become rarer since it fell.
When all links become narrower at once, the first learner to measure it looks narrow beside the others until they have
measured it too: a rate is the median of five bodies (learner/ways.py)."""
SMALL_BYTES = 2**18
"""Size of a body that fits into the buffers of its sockets. The time that a smaller one takes is as much that of busy
processes at both ends as that of the link, so a message names the time, and no width of the link."""
WORTH_TELLING = 0.2
"""Least relative change of H that is worth an event."""
COMMITS = 24
"""Number of commits of which the quickest counts: that round has not waited for another one."""
MERGES = 5
"""Number of commits whose median is the time of merge and disk. A single pause of the disk must not change the
interval, and the first commit holds the first use of a kernel: the median counts once most of these are there."""
MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Narrowest:
    """Part that limits how fast rounds can follow each other."""

    part: str
    """Name of the part as screens show it: "way down of site-2", "merge and disk"."""
    seconds: float
    """Seconds that one round occupies the part."""
    nbytes: float = 0.0
    """Bytes of one round that pass the part; 0: it is no link."""
    ways_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that one round occupies the learner's way up and its way down; 0: not measured, or no link."""

    def describe(self, interval_s: float) -> str:
        """Say how much of the part is used: "way down of site-2: 58 of 60 Mbit/s"."""
        if not self.nbytes:
            return f"{self.part}: {self.seconds:.3g} of every {interval_s:.3g} s"
        if self.is_small:
            return f"{self.part}: {self.describe_body()} of every {interval_s:.3g} s"
        used, carried = self.use_of_link(interval_s)
        return f"{self.part}: {used / MBIT:.3g} of {carried / MBIT:.3g} Mbit/s"

    def use_of_link(self, interval_s: float) -> tuple[float, float]:
        """Return the bytes per second that pass the link, and those that it carries; zeros if the part is no link."""
        return self.nbytes / interval_s, self.nbytes / self.seconds

    @property
    def is_small(self) -> bool:
        """Whether its bodies are too small to tell a narrow link from busy processes."""
        return 0 < self.nbytes < SMALL_BYTES

    def describe_body(self) -> str:
        return f"a body of {self.nbytes / 1000:.3g} kB takes {self.seconds:.3g} s"


class RoundInterval:
    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.asked_steps = schedule.interval(state.settings)
        """Steps from one round to the next, if every part carries as many rounds."""
        self.carried_s = 0.0
        """Seconds from one round to the next that the narrowest part needs; 0: H/P steps are longer."""
        self.narrowest: Narrowest | None = None
        """Part that makes the interval longer than H/P steps; None: no part does."""
        self.bodies: dict[str, int] = {}
        """Bytes of a contribution to the largest fragment, keyed by codec; empty: not known."""
        self.up_bytes = self.down_bytes = 0.0
        """Bytes of a contribution and of a version, averaged over the fragments; 0: not known."""
        self.contribution_bytes = self.budget_bytes = 0
        """Memory that one contribution under way takes in the syncer (0: not known, no limit), and the most that all of
        them together may take."""
        self.needed = schedule.least_flights(state.settings)
        """Number of rounds under way that keeps the interval."""
        self._merges_s: deque[float] = deque(maxlen=MERGES)
        """Seconds from the last answer, or from the round's turn to commit, to its commit: merge and disk."""
        self._told_h = float(state.settings.sync_every)
        """H that the last event named."""
        self._round_s: deque[float] = deque(maxlen=COMMITS)
        """Seconds from freezing to commit, of the newest commits."""
        self._near_s = 0.0
        """Longest time per round of a way whose learner takes part in every round."""

    def start_anew(self) -> None:
        """Begin with new settings of H, τ or adoption. What links carry stays known; how long rounds take does not."""
        self.asked_steps = schedule.interval(self._state.settings)
        self.needed = schedule.least_flights(self._state.settings)
        self._told_h = float(self._state.settings.sync_every)
        self._round_s.clear()

    # ---- rounds under way ---------------------------------------------------------------------------------------

    @property
    def affordable(self) -> int:
        """Number of rounds under way that the memory in the settings allows."""
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
        """Measure a committed round, and compute the interval and the shares anew. `overlap`: the 95th percentile over
        the last two cycles."""
        settings, step_s = self._state.settings, self._state.members.step_s()
        if self._state.draining or round_.attempt > 1 or not step_s:  # step_s is 0 if all reports came in one burst
            return
        self._round_s.append(max(0.0, now - round_.frozen_at))
        self._merges_s.append(now - round_.merging_at)
        asked = max(schedule.interval(settings), self._interval_by_overlap(overlap))
        asked_s = asked * step_s
        narrowest = self._find_narrowest()
        carried_s = HEADROOM * narrowest.seconds
        self.narrowest = narrowest if carried_s > asked_s else None
        if settings.synchronous:
            return
        interval_s = max(asked_s, carried_s)
        self._tell(interval_s, step_s)
        drained_s = carried_s * (1 + self._drain_share(interval_s, step_s))
        self.asked_steps, self.carried_s = asked, drained_s if drained_s > asked_s else 0.0
        # One more than start in the time of a round, because another one is due as the oldest commits.
        self.needed = min(ceil(min(self._round_s) / interval_s) + 1, schedule.most_flights(settings))
        self._set_shares(interval_s)

    def _interval_by_overlap(self, overlap: float | None) -> float:
        """Return the interval in steps that the overlap asks for, with an H below P or below that of the last phase.

        A learner reads a fragment again only after it adopted the fragment's last version, so it can sync the fragment
        once in overlap + 1 steps. A round that came earlier would find hardly any learner ready. However large the
        overlap is, the interval is at most one step, or that of the last phase."""
        settings = self._state.settings
        last = settings.phases[-1].sync_every if settings.phases else settings.sync_every
        assert last is not None, "phases are resolved"
        most = max(last, settings.fragments)
        # With an H of P or more the rule gained nothing (adr/0040): rounds are fuller, and fewer.
        if overlap is None or settings.sync_every >= most or settings.synchronous:
            return 0.0
        return min(overlap + 1, most) / settings.fragments

    def _tell(self, interval_s: float, step_s: float) -> None:
        """Emit an event if H differs much from the H that the last one named, with the part that sets it."""
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
        """Return the share by which the interval grows so that versions queued at the median learner drain. Versions
        that are on their way, or wait for the next boundary, are not queued."""
        queues = []
        for learner in self._state.members.stepping_learners():
            way_s = _seconds_of(self.down_bytes, learner.down_rates)
            if way_s and learner.share == 1.0 and learner.versions:
                lacking = sum(map(lt, learner.versions, self._state.versions))
                queues.append(lacking - ceil((way_s + step_s) / interval_s) - 1)
        queue = sorted(queues)[(len(queues) - 1) // 2] if queues else 0
        return min(1.0, DRAIN * max(0, queue))

    def _find_narrowest(self) -> Narrowest:
        """Return the part with the longest time per round: merge and disk, or the way that sets the pace."""
        merge_s = median(self._merges_s) if 2 * len(self._merges_s) > MERGES else 0.0
        merge = Narrowest("merge and disk", merge_s)
        learners = self._state.members.stepping_learners()
        ways = sorted(map(self._narrower_way, learners), key=_seconds)
        if not ways:
            return merge
        middle_s = ways[(len(ways) - 1) // 2].seconds  # of two in the middle, the wider one
        self._near_s = NEAR * middle_s
        near = [way for way in ways if way.seconds <= self._near_s]
        return max(merge, near[-1], key=_seconds)

    def _narrower_way(self, learner: KnownLearner) -> Narrowest:
        """Return the way of the learner that takes longer for one round, with 0 seconds if neither was measured."""
        up_s, down_s = _seconds_of(self.up_bytes, learner.up_rates), _seconds_of(self.down_bytes, learner.down_rates)
        if up_s > down_s:
            return Narrowest(f"way up of {learner.name}", up_s, self.up_bytes, (up_s, down_s))
        return Narrowest(f"way down of {learner.name}", down_s, self.down_bytes, (up_s, down_s))

    def lead_s(self, learner: KnownLearner) -> float:
        """Return how many seconds before its round freezes a learner with a share is asked for its contribution."""
        up_s = _seconds_of(self.up_bytes, learner.up_rates)
        return max(up_s, learner.answer_s.value or 0.0) + (learner.step_s.value or 0.0)

    def most_owed(self, learner: KnownLearner, round_s: float) -> int:
        """Return how many versions with its own steps a learner with a share may lack when it is asked for more: as
        many as are made in the time of an answer and a version, and one that waits."""
        down_s = _seconds_of(self.down_bytes, learner.down_rates)
        return ceil((self.lead_s(learner) + down_s) * learner.share / round_s) + 1

    # ---- shares -------------------------------------------------------------------------------------------------

    def describe_way(self, learner: KnownLearner) -> str:
        """Name the way that limits a learner's share, and what it carries: "way down 15 Mbit/s"."""
        way = self._narrower_way(learner)
        if not way.seconds:
            return ""
        name = way.part.removesuffix(f" of {learner.name}")
        if way.is_small:
            return f"{name}: {way.describe_body()}"
        return f"{name} {way.nbytes / way.seconds / MBIT:.3g} Mbit/s"

    def _set_shares(self, interval_s: float) -> None:
        """Give each learner the share of the rounds that its ways carry, and tell those whose share changes."""
        learners = self._state.members.stepping_learners()
        all_have_shares = not any(learner.share == 1.0 for learner in learners)
        for learner in learners:
            way = self._narrower_way(learner)
            share = self._carried_share(way.seconds, interval_s)
            if share > learner.share:
                share = max(learner.share, self._carried_share(RISES_AT * way.seconds, interval_s))
            # A smaller share holds at once, or bodies queue. A larger one has to last.
            learner.rising = learner.rising + 1 if share > learner.share else 0
            lasts = RISES_AFTER * self._state.settings.fragments
            if interval_s > NEAR * learner.fell_at_s or all_have_shares:
                lasts = min(lasts, MEASURED_AFTER)
            if 0 < learner.rising < lasts:
                continue
            if share != learner.share:
                learner.fell_at_s = interval_s if share < learner.share else inf
                learner.rising = 0
                learner.share = share
                reason = _describe_share(share, way, interval_s)
                self._state.out.send(learner.name, RoundShare(share=share, reason=reason))
                self._state.out.note("share", f"{learner.name}: {reason}", learner, share=share)

    def _carried_share(self, way_s: float, interval_s: float) -> float:
        """Return the share of the rounds for which a way has time that takes so long for the body of one."""
        if way_s <= max(self._near_s, interval_s):
            return 1.0
        return _round_share(interval_s / (HEADROOM * way_s), least=1 / self._state.settings.fragments)


def _seconds_of(nbytes: float, rates: tuple[float, float]) -> float:
    """Return the seconds of a body on the slowest stretch of a way: the learner's own link, and that of its relay. A
    rate of 0 was not measured; the result is 0 if none was. A claim of less than 1 byte/s counts as 1: the times that
    follow from it stay finite."""
    return max((nbytes / max(1.0, rate) for rate in rates if rate > 0), default=0.0)


def _seconds(part: Narrowest) -> float:
    return part.seconds


def _round_share(carried: float, least: float) -> float:
    """Round down what a link carries of the rounds to a share: a multiple of 1/8, or 1/n below 1/8."""
    if carried >= 1 / EIGHTHS:
        return floor(EIGHTHS * carried) / EIGHTHS
    return max(least, 1 / ceil(1 / carried))


def _describe_share(share: float, way: Narrowest, interval_s: float) -> str:
    if share == 1.0:
        return "its bodies pass in time again: it takes part in every round"
    if way.is_small:
        share_of = f"it takes part in {100 * share:.0f} % of the rounds"
        return f"{way.part}: {way.describe_body()}, a round begins every {interval_s:.3g} s: {share_of}"
    return f"{way.part} carries {way.nbytes / way.seconds / MBIT:.3g} Mbit/s, every round takes " + (
        f"{way.nbytes / interval_s / MBIT:.3g}: it takes part in {100 * share:.0f} % of the rounds"
    )
