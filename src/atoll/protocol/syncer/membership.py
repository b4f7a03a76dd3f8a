"""What the syncer knows of each learner, and who counts as live, stepping and reachable.

A learner is known by its name; each of its lives is an incarnation. Processes are told apart by their sessions; one
process has several lives if it was quarantined, was given up or replaced while it was away, or knew rounds that the
disk lost. A new incarnation joins, takes the run's parameters, and is *recovered* once it has adopted a committed
version of every fragment and waits for no peer's state: only then may it contribute. Live means: connected, recovered,
not muted (it reports but does not answer pulls), not stalled (it is there but makes no steps). Stepping means: live,
and its training loop has not ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Literal

from atoll.protocol import schedule
from atoll.protocol.history import Life
from atoll.protocol.messages import Hello, Progress
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import Average, KeptValues
from atoll.protocol.syncer.budget import Counted, believed_rate, rate_of
from atoll.protocol.syncer.claims import Usual
from atoll.protocol.syncer.downloads import Download

LearnerState = Literal["joining", "training", "gone"]
STALLED_STEPS = 8
"""A learner that makes no step for this many of its step times, and for `stalled_after_s`, is stalled."""
SLOWER = 16.0
"""However slow a learner's steps are, no quorum waits as if they were over this many times as long as the usual."""


@dataclass(slots=True)
class KnownLearner:
    name: str
    session: str
    incarnation: int
    joined_at: float
    fragments: int
    state: LearnerState = "joining"
    recovered: bool = False
    """It has said that it took the run's parameters, and waits for no peer's state."""
    muted: bool = False
    stopped: bool = False
    leaving: bool = False
    """It reports that it was asked to leave."""
    stalled: bool = False
    """The syncer does not wait for it, because it makes no steps."""
    starting: bool = False
    """It reports that it is in its first step and uses the processor."""
    excused: bool = False
    """Its first step explains why it makes no steps: that counts as no fault."""
    first_step_s: float = 0.0
    """Seconds since that step began."""
    paused_at: float = 0.0
    """When it made its last step, or owed us none any more, before it was stalled."""
    compiled: bool = False
    """Whether `step_s` has the time of that step alone."""
    last_heard: float = 0.0
    last_step_at: float = 0.0
    idle_at: float = 0.0
    """When it last owed us no step: it had stopped, or (synchronous) it waited for a round."""
    t: int = 0
    offer: int = -1
    offers_from: int = -1
    """It has copied the fragment of every round from this one to `offer`."""
    aims: int = -1
    steps: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    tokens_total: int = 0
    tokens_before: int = 0
    """Tokens of its earlier incarnations, as they counted."""
    origin: int = 0
    """Tokens of its process that earlier incarnations have accounted for, where another had its name in between."""
    budgeted: Counted = field(default_factory=Counted)
    """What of `tokens_total` counts towards the run's budget."""
    busy_s: float = 0.0
    """Seconds that its process has been stepping, as it last said."""
    busy_before: float | None = None
    """The same as it first said to this term of the syncer; None: it has said nothing yet."""
    busy_earlier: float = 0.0
    """Seconds that earlier processes of the name were stepping in this term."""
    loss: float | None = None
    agreement: float | None = None
    """How far its last contribution agreed with the others'."""
    influence: float | None = None
    """Its share of the last merge that it was in."""
    suspect: str = ""
    """Why what it gives is not trusted; empty: it is. When the run is rolled back it goes into quarantine."""
    misses: int = 0
    missed_at: float = 0.0
    """Time of the last miss."""
    strikes: int = 0
    helper: str = ""
    """The peer whose state it goes on with, until a contribution of its own is taken."""
    distrusted: set[str] = field(default_factory=set)
    """Sessions of peers whose state it refused, or that it went into quarantine with: it takes no more of theirs."""
    declared: int = 0
    """The most tokens that one of its steps has, as it said when it joined; 0: it said nothing."""
    usual: Usual = field(default_factory=Usual)
    """What this life has claimed so far."""
    above: str = ""
    """How far its tokens per step are above the others'; empty: they are not, or it was not looked at yet."""
    compared_at: int = 0
    """The step at which its tokens per step are next held against the others'."""
    step_s: Average = field(default_factory=Average)
    answer_s: Average = field(default_factory=Average)
    """From being asked to its whole answer."""
    merged: list[int] = field(default_factory=list)
    """Per fragment, the version its last contribution went into; −1 for none."""
    least: list[int] = field(default_factory=list)
    """Per fragment, the version that the run was last rolled back with, for all learners the same list."""
    merged_tokens: dict[int, int] = field(default_factory=dict)
    """Per fragment, the tokens of that contribution."""
    late: set[int] = field(default_factory=set)
    """Fragments for which it was not ready yet when the grace window opened the last time."""
    declined: dict[int, int] = field(default_factory=dict)
    """Per fragment, its step when it last had nothing to give: it is not asked again before the next one."""
    synced_t: dict[int, int] = field(default_factory=dict)
    """Per fragment, its step when the fragment was last synced."""
    overlaps: dict[int, int] = field(default_factory=dict)
    """Per fragment, its steps from reading its last contribution to adopting the version that holds it."""
    dropped: tuple[int, ...] = ()
    """Per fragment, tokens it overwrote, as it last said."""
    position: int = -1
    """Leased samples it has taken, as it last said."""
    reset: bool = False
    """It is to start with a fresh inner optimizer, and has not said yet that it did."""
    draining: str = ""
    """Why it was asked to leave, once it was."""
    closed: bool = False
    """Its account is closed: this incarnation is over for good."""
    closed_for: str = ""
    """Why it is closed."""
    left: bool = False
    """It said that it leaves, or the syncer has closed its account."""
    may_return: bool = False
    """It was in the last rounds of a run that had ended and is opened again: it may come back, or has."""
    probed_at: float = 0.0
    up_rates: tuple[float, float] = (0.0, 0.0)
    """Bytes per second that its way up carries, and that of its relay; 0: not measured."""
    down_rates: tuple[float, float] = (0.0, 0.0)
    """Bytes per second that its way down carries, and that of its relay; 0: not measured."""
    share: float = 1.0
    """Share of the rounds that it takes part in (interval.py)."""
    rising: int = 0
    """Number of commits in a row that found its ways carry a larger share (interval.py)."""
    fell_at_s: float = inf
    """Seconds from one round to the next when its share last fell (interval.py)."""
    merged_share: float | None = None
    """Share of its last work that was merged, when that was last looked at (learner_warnings.py)."""
    download: Download = field(default_factory=Download)
    """Download of the parameters, while it joins."""

    @property
    def connected(self) -> bool:
        return self.state != "gone"

    @property
    def live(self) -> bool:
        return self.state == "training" and not self.muted and not self.stalled

    @property
    def busy_in_term(self) -> float:
        """Seconds that all processes of the name were stepping since this term of the syncer first heard of each."""
        spent_s = 0.0 if self.busy_before is None else max(0.0, self.busy_s - self.busy_before)
        return self.busy_earlier + spent_s

    @property
    def was_asked_to_leave(self) -> bool:
        """By the operator here, or by whoever has its machine."""
        return self.leaving or bool(self.draining)

    def may_give(self, fragment: int) -> bool:
        """Not while the version that holds its last contribution, or one that the run was rolled back with, is still
        on its way to it."""
        return bool(self.versions) and self.versions[fragment] >= self.least_base(fragment)

    def least_base(self, fragment: int) -> int:
        return max(self.merged[fragment], self.least[fragment] if self.least else -1)

    def has_more(self, fragment: int) -> bool:
        """Whether it has steps of this fragment that no version contains, on a base it may use."""
        return self.may_give(fragment) and bool(self.steps) and self.steps[fragment] > 0

    def is_ready(self, fragment: int) -> bool:
        """It has steps of this fragment to give, and made one since it last had none."""
        return self.has_more(fragment) and self.t > self.declined.get(fragment, -1)

    def last_merged(self) -> tuple[tuple[int, int, int], ...]:
        """Per fragment, the version its last contribution went into, the step it was read at and its tokens."""
        return tuple(
            (version, self.synced_t.get(fragment, 0), self.merged_tokens.get(fragment, 0))
            for fragment, version in enumerate(self.merged)
        )

    def unmerged_tokens(self) -> float:
        """Tokens that no version contains yet, averaged over the fragments."""
        return sum(self.tokens) / self.fragments if self.tokens else 0.0


class Membership:
    """All learners a run has seen, by name."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.learners: dict[str, KnownLearner] = {}
        self._by_name: list[KnownLearner] = []
        """In the order of their names."""
        self.asked_to_leave: dict[str, str] = {}
        """Session → why, of processes that the operator drains: another may have their name when they come back."""
        self.least = [-1] * settings.fragments
        """Per fragment, the version that the run was last rolled back with."""
        self._counted = 0
        """Tokens that all learners together trained on, as far as that is believed …"""
        self._uncounted = 0
        """… of which an earlier term was told and did not count these."""
        self._live_steps_s, self._stepping_steps_s, self._answers_s = KeptValues(), KeptValues(), KeptValues()
        """Step times of live and of stepping learners, and answer times of reachable ones."""
        self._tokens_per_step, self._known_per_step = KeptValues(), KeptValues()
        """Usual tokens per step of reachable learners: of those that have made any, and of those that are known."""
        self._merged_shares = KeptValues()
        """`merged_share` of reachable learners."""

    def find_or_begin_life(self, now: float, hello: Hello, run: str) -> tuple[KnownLearner, bool]:
        """The learner of this hello, and whether it is a new incarnation. No number is given twice, also where the disk
        did not keep that it was given."""
        known = self.learners.get(hello.learner)
        if known is not None and known.session == hello.session and not known.closed:
            self._come_back(now, known, hello, run)
            return known, False
        again = known is not None and known.session == hello.session
        origin = hello.tokens_total if not again and _comes_back_after_another(known, hello, run) else 0
        learner = KnownLearner(
            name=hello.learner,
            session=hello.session,
            incarnation=1 + max(known.incarnation if known else 0, hello.incarnation if hello.run == run else 0),
            joined_at=now,
            fragments=self.settings.fragments,
            last_heard=now,
            last_step_at=now,
            t=hello.t,
            tokens_total=known.tokens_total if known is not None and again else origin,
            tokens_before=_tokens_before(known, hello.session),
            origin=origin,
            budgeted=known.budgeted if known is not None and again else Counted(0, now, now),
            merged=[-1] * self.settings.fragments,
            least=self.least,
            draining=self.asked_to_leave.get(hello.session, ""),
            declared=hello.tokens_per_step,
            may_return=known is not None and known.may_return,
        )
        if known is not None and again:
            learner.busy_s, learner.busy_before, learner.busy_earlier = (
                known.busy_s,
                known.busy_before,
                known.busy_earlier,
            )
        elif known is not None:
            learner.busy_earlier = known.busy_in_term
        learner.budgeted.begin(now)
        self._add(learner)
        return learner, True

    def remember_life(self, name: str, life: Life) -> None:
        """A learner that an earlier term knew; it is away until it says hello."""
        learner = KnownLearner(name, life.session, life.incarnation, 0.0, self.settings.fragments, state="gone")
        learner.t, learner.least = life.t, self.least
        learner.tokens_total, learner.tokens_before = life.total, life.before
        learner.budgeted = Counted(life.total, before=life.total)
        learner.merged = [version for version, _, _ in life.merged]
        learner.synced_t = {f: t for f, (version, t, _) in enumerate(life.merged) if version >= 0}
        learner.merged_tokens = {f: tokens for f, (version, _, tokens) in enumerate(life.merged) if version >= 0}
        learner.closed = not life.open
        learner.closed_for = "" if life.open else "in an earlier term of the syncer"
        self._add(learner)

    def expect_back(self, versions: Sequence[int]) -> None:
        """The run had ended and is opened again: those whose last steps are in its newest versions may come back."""
        for one in self.learners.values():
            one.may_return = one.closed and any(
                0 <= last == now for last, now in zip(one.merged, versions, strict=True)
            )
            one.closed_for = "the run had ended" if one.closed else ""

    def recall_progress(self, progress: float) -> None:
        """An earlier term came this far: the rest of what it was told by then it had not counted."""
        if self.settings.tokens:
            self._uncounted = max(0, self.total_tokens() - ceil(progress * self.settings.tokens))

    def _add(self, learner: KnownLearner) -> None:
        place = bisect_left(self._by_name, learner.name, key=_name)
        known = learner.name in self.learners
        self._by_name[place : place + known] = [learner]
        self.learners[learner.name] = learner
        self._counted = sum([one.tokens_before + one.budgeted.tokens for one in self._by_name])
        self.update_medians(learner)

    def _come_back(self, now: float, learner: KnownLearner, hello: Hello, run: str) -> None:
        """The same process dials again: what it holds is what it says now; what it offers, its next report tells."""
        learner.declared = learner.declared or hello.tokens_per_step
        same = hello.run == run and hello.incarnation == learner.incarnation
        recovered = learner.recovered and same and min(hello.versions, default=-1) >= 0
        learner.state = "training" if recovered else "joining"
        learner.versions = hello.versions if recovered else ()
        if learner.missed_at >= learner.last_heard + self.settings.heartbeat_s:
            # It was silent then, not mute: the pulls never reached it. A probe would cost it rounds.
            learner.muted, learner.misses = False, 0
        learner.last_heard = learner.last_step_at = now
        learner.joined_at = learner.joined_at or now
        learner.budgeted.begin(now)
        learner.t = max(learner.t, hello.t)
        learner.offer = learner.aims = -1
        learner.stalled = learner.excused = learner.starting = False
        learner.rising = 0
        learner.share = 1.0  # it may have another link now, and its welcome told it of no share
        # It may come without its relay now; a relay tells its rates again.
        learner.up_rates, learner.down_rates = (learner.up_rates[0], 0.0), (learner.down_rates[0], 0.0)
        self.update_medians(learner)

    def restart_learner(self, now: float, learner: KnownLearner) -> None:
        """The same process starts over as a new incarnation (quarantine)."""
        learner.incarnation += 1
        learner.state, learner.joined_at = "joining", now
        learner.strikes = learner.misses = 0
        learner.reset, learner.closed, learner.recovered = True, False, False
        learner.versions, learner.offer = (), -1
        learner.declined.clear()
        learner.late.clear()
        learner.synced_t.clear()
        learner.overlaps.clear()
        learner.merged_tokens.clear()
        learner.merged = [-1] * self.settings.fragments
        learner.dropped, learner.position, learner.usual = (), -1, Usual()
        learner.merged_share, learner.download = None, Download()
        self.update_medians(learner)

    def take_report(self, now: float, learner: KnownLearner, progress: Progress, furthest: int) -> None:
        """Take in a progress message. `furthest`: rounds past this one it cannot have copied."""
        offer, aims = min(progress.offer, furthest), min(progress.aims, furthest)
        if progress.t > learner.t and learner.state == "training":
            if learner.compiled:
                learner.step_s = Average()  # what torch.compile took says nothing about the steps behind it
            learner.step_s.add((now - learner.last_step_at) / (progress.t - learner.t))
            learner.compiled = learner.excused
        learner.usual.add(now, progress.t, progress.tokens_total)
        counted = learner.budgeted.tokens
        learner.budgeted.add(now, progress.tokens_total - learner.origin, lambda: self._rate(now, learner))
        self._counted += learner.budgeted.tokens - counted
        if progress.t != learner.t or progress.stopped:
            learner.last_step_at = now
        if offer > learner.offer + 1 or learner.offer < 0:
            first = schedule.first_read_with(offer, self.settings) if self.settings.synchronous else offer
            if learner.offer < 0 or first > learner.offer + 1:
                learner.offers_from = first
        learner.t, learner.steps, learner.tokens = progress.t, progress.steps, progress.tokens
        learner.versions, learner.offer, learner.aims = progress.versions, offer, aims
        learner.tokens_total, learner.busy_s = progress.tokens_total, progress.busy_s
        if learner.busy_before is None:
            learner.busy_before = progress.busy_s
        learner.loss, learner.stopped, learner.leaving = progress.loss, progress.stopped, progress.leaving
        learner.reset, learner.starting = False, progress.starting
        learner.dropped, learner.position = progress.dropped, progress.position
        learner.up_rates = (max(0.0, progress.up_rate), learner.up_rates[1])
        learner.down_rates = (max(0.0, progress.down_rate), learner.down_rates[1])
        self.update_medians(learner)

    def take_relay_rates(self, names: Sequence[str], up_rate: float, down_rate: float) -> None:
        """Take in what the link of a relay carries, for the learners that come through it."""
        for learner in [self.learners[name] for name in names if name in self.learners]:
            learner.up_rates = (learner.up_rates[0], max(0.0, up_rate))
            learner.down_rates = (learner.down_rates[0], max(0.0, down_rate))

    def update_medians(self, learner: KnownLearner) -> None:
        """Take in what this learner adds to the medians below. To be called wherever that changes: its state, whether
        it is muted, stalled or stopped, its times, what it usually claims, the share of its work that is merged."""
        reachable, usual, step_s = learner.state == "training", learner.usual, learner.step_s.value
        live = reachable and not learner.muted and not learner.stalled
        self._live_steps_s.put(learner.name, step_s if live else None)
        self._stepping_steps_s.put(learner.name, step_s if live and not learner.stopped else None)
        self._answers_s.put(learner.name, learner.answer_s.value if reachable else None)
        per_step = usual.per_step if reachable and usual.tokens > 0 else None
        self._tokens_per_step.put(learner.name, per_step)
        self._known_per_step.put(learner.name, per_step if usual.known else None)
        self._merged_shares.put(learner.name, learner.merged_share if reachable else None)

    # These are asked at every event: they repeat the tests of `KnownLearner.live` and `connected` to save the calls.

    def live_learners(self) -> list[KnownLearner]:
        return [one for one in self._by_name if one.state == "training" and not one.muted and not one.stalled]

    def names_alive(self, heard_since: float) -> list[str]:
        """Alive and recovered: the denominator of participation. The muted and those that are not ready count; who
        makes no steps at all does not (it has no work to merge), nor who has fallen silent (its machine stands).
        Learners with a share of the rounds that have no turn are taken off later (`RoundClosing.without_turn`)."""
        return [one.name for one in self.reachable_learners() if not one.stalled and one.last_heard >= heard_since]

    def reachable_learners(self) -> list[KnownLearner]:
        """Live, or muted, or stalled: all that could have last steps to give."""
        return [one for one in self._by_name if one.state == "training"]

    def stepping_learners(self) -> list[KnownLearner]:
        """Live, and the training loop has not ended."""
        return [
            one
            for one in self._by_name
            if one.state == "training" and not one.muted and not one.stalled and not one.stopped
        ]

    def connected_learners(self) -> list[KnownLearner]:
        return [one for one in self._by_name if one.state != "gone"]

    def step_s(self) -> float | None:
        """ξ_step: the median of the live learners' averages."""
        return self._live_steps_s.median

    def answer_s(self) -> float | None:
        """ξ_answer: the median of the learners' averages, of two the quicker."""
        return self._answers_s.lower_median

    def per_step(self, but: KnownLearner, least: int = 1) -> float | None:
        """Return the median of the others' usual tokens per step; None: fewer than `least` of them are known. A
        learner that is not known yet is judged by all that have made steps, if there are several: a single other
        learner may be the one that lies."""
        if but.usual.known:
            return self._known_per_step.median_without(but.name, least)
        return self._tokens_per_step.median_without(but.name, max(2, least))

    def merged_share_of_others(self, but: KnownLearner) -> float | None:
        """Return the median of the others' merged shares; None: none is known."""
        return self._merged_shares.median_without(but.name)

    def total_tokens(self) -> int:
        """Trained on by all together, as far as that is believed."""
        return self._counted - self._uncounted

    def _rate(self, now: float, but: KnownLearner) -> float | None:
        """Tokens per second that it may count: by the others' rates; the least while they may still show theirs; None:
        no limit."""
        others = [one for one in self._by_name if one is not but and not one.closed] if self.settings.tokens else []
        rates = [rate for one in others if (rate := rate_of(one.budgeted, one.usual)) is not None]
        train = any(self._trains(now, one) for one in others)
        return believed_rate(rates, self.settings.tokens) if rates or train else None

    def step_rates(self, now: float, but: KnownLearner) -> list[float] | None:
        """Steps per second of the others, 0 of those that have yet to show theirs; None: none of them trains."""
        others = [one for one in self._by_name if one is not but and not one.closed]
        train = {one.name for one in others if self._trains(now, one)}
        known = [(one.name, 1 / one.step_s.value if one.step_s.value else 0.0) for one in others]
        return [rate for name, rate in known if rate or name in train] if train else None

    def _trains(self, now: float, one: KnownLearner) -> bool:
        """It has not come to its end: it is there, or was heard within `assemble_s`."""
        return not one.stopped and (one.connected or now < one.last_heard + self.settings.assemble_s)

    def silence_limit(self, learner: KnownLearner) -> float:
        return learner.last_heard + self.settings.lost_after_s

    def stall_limit(self, learner: KnownLearner) -> float:
        """After this moment without a step a learner is not waited for. How long its first takes nobody knows: where
        all wait for it, it has the time that a run gives to assemble."""
        step_s, unknown_s = learner.step_s.value, self.settings.assemble_s if self.settings.synchronous else 0.0
        patience_s = max(self.settings.stalled_after_s, unknown_s if step_s is None else STALLED_STEPS * step_s)
        return max(learner.last_step_at, learner.idle_at) + patience_s

    def longest_stall_s(self) -> float:
        """The longest time that one of the stepping learners may go without a step. The slowest is believed to be at
        most `SLOWER` times as slow as the median learner, of two the quicker."""
        highest_s, median_s = self._stepping_steps_s.highest or 0.0, self._stepping_steps_s.lower_median or 0.0
        longest_s = min(highest_s, SLOWER * median_s)
        return max(self.settings.stalled_after_s, STALLED_STEPS * longest_s)


def _name(one: KnownLearner) -> str:
    return one.name


def _comes_back_after_another(known: KnownLearner | None, hello: Hello, run: str) -> bool:
    """This process had a life in this run, and another process has had its name since."""
    return known is not None and hello.run == run and hello.incarnation > 0


def _tokens_before(known: KnownLearner | None, session: str) -> int:
    """Tokens of the name's earlier processes. The same process in a new life keeps its own count, so nothing of it is
    added here."""
    if known is None:
        return 0
    return known.tokens_before + (known.budgeted.tokens if known.session != session else 0)
