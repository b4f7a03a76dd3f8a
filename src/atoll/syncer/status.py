"""What people and evaluators read of a run: its live figures, from the state machine and a few running sums; what it
lacks, where it falls behind; its manifest; and the event of a score."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, log2
from statistics import fmean, median
from typing import Any

import msgspec

from atoll.bucket.uploader import StoreLag
from atoll.config import Config
from atoll.fabric.wire import MIB, ScoreReport, one_line
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol import schedule
from atoll.protocol.ledger import Totals
from atoll.protocol.statistics import LearnerTime, format_score, participation, spread
from atoll.protocol.syncer.interval import HEADROOM, RoundInterval
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.membership import KnownLearner
from atoll.syncer.recovery import outer_of
from atoll.telemetry.status import STEPPING, LearnerStatus, RelayStatus, RunStatus

RECENT = 256
"""Rounds behind the live figures."""
CYCLES = 4
"""Rounds of each fragment behind the live figures of the outer step."""
BEHIND = 64
"""Versions of a fragment of which the round is remembered."""
ENOUGH = 0.01
"""Of the budget: so much must be done before the rest is estimated by it."""
SHOWN = 3
"""Downloads, or first steps, that a notice names."""
TOLD_S = 10.0
"""A start that takes longer is told with its time."""
FIRST_STEP_S = 5.0
"""A first step that is worth a notice."""
RECOVERING = ("joining", "starting", "training")
"""States of a learner in quarantine: it takes the run's parameters and trains, and no round takes from it yet."""
PHASES = {"empty": "waiting", "running": "training", "ending": "ending", "finished": "finished"}


class Meter:
    def __init__(self, config: Config) -> None:
        self._learners = config.protocol.learners
        self._time = LearnerTime(config.protocol.learners)
        self._config = config
        self._began: float | None = None
        self._held_back = False
        """The run has its first parameters, and training has not begun."""
        self._ended: float | None = None
        self._commits: deque[float] = deque(maxlen=RECENT)
        self._shares: deque[float] = deque(maxlen=RECENT)
        self._outer: dict[int, deque[tuple[float, float]]] = {}
        """Per fragment, ρ and the effective outer step of its newest rounds."""
        self._versions: dict[int, deque[tuple[int, int]]] = {}
        """Per fragment, its newest (version, round): enough for learners that are not far behind."""
        self._first_seen: tuple[float, float] | None = None
        """When the status was first made of a run under way, and its progress then."""
        self._joined = False
        """Whether a learner has come since this syncer started."""
        self._deserted_since: float | None = None
        """When the status first told that no learner was connected; None: some are."""
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._score: ScoreReport | None = None
        self.alarm = ""
        """Why nothing can be committed; empty: it can."""
        self._rules_alarms: dict[str, str] = {}
        """The alarms that the state machine raised and that are not over, by what they are about."""
        self._quarantines: dict[str, str] = {}
        """Quarantined learners that no round has taken from since, and why."""
        self.supervised = False
        """`atoll train` starts the learners, and restarts them."""
        self.scorer = True
        """False: no evaluator is left that would score the model."""
        self.evaluator: Callable[[], tuple[bool | None, float | None]] = lambda: (None, None)
        """Whether an evaluator is here, and when the last one was heard of."""
        self.store: Callable[[], StoreLag | None] = lambda: None
        """How far the bucket is behind; None: there is none."""
        self.relays: Callable[[], tuple[RelayStatus, ...]] = tuple
        """The relays that have been here."""
        self.standby: Callable[[], str] = str
        """The machine and process of a standby; empty: none waits."""
        self.disk_free_bytes: Callable[[], int | None] = lambda: None
        self.upload: Callable[[], str] = str
        """How much of the first parameters has arrived; empty: none are on their way."""
        self.notice: Callable[[], str] = str
        """What the operator should do soon; empty: nothing."""

    def note_event(self, at: float, kind: str, data: dict[str, Any], text: str = "") -> None:
        if kind in ("joined", "recovered") and data.get("learner"):
            self._time.add_learner(at, data["learner"])
        elif kind in ("lost", "left"):
            self._time.remove_learner(at, data["learner"])
        self._joined = self._joined or kind == "joined"
        if kind in ("initial", "begun"):
            self._held_back = kind == "initial"
        if kind in ("recovered", "begun") and self._began is None and not self._held_back:
            self._began = at
            self._time.begin_part(at)
        elif kind == "round":
            self._commits.append(at)
            self._shares.append(participation(len(data["members"]), data["live"]))
            for member in data["members"] if self._quarantines else ():
                self._quarantines.pop(member["learner"], None)
            known = self._versions.setdefault(data["fragment"], deque(maxlen=BEHIND))
            known.append((data["version"], data["round"]))
            if data.get("rho") is not None:
                of_fragment = self._outer.setdefault(data["fragment"], deque(maxlen=CYCLES))
                of_fragment.append((data["rho"], data["outer_step"]))
        elif kind == "quarantined":
            self._quarantines[data["learner"]] = describe_quarantine(data["reason"], data["times"], data["wait_s"])
        elif kind == "phase":
            self._outer.clear()
        elif kind == "changed" and "learners" in data:
            self._time.change_meant(at, data["learners"])
            self._learners = data["learners"]
        elif kind == "ending":
            self._ended = at
            self._time.end_part(at)
        elif kind == "alarm":
            self._rules_alarms.pop(data.get("about", ""), None)
            if not data["over"]:
                self._rules_alarms[data.get("about", "")] = text

    def note_score(self, score: ScoreReport) -> None:
        self._score = score

    def make_status(self, now: float, run: str, machine: Syncer | None, traffic: tuple[int, int] = (0, 0)) -> RunStatus:
        """`traffic`: bytes received and sent so far."""
        elapsed = (self._ended or now) - self._began if self._began else 0.0
        known = sorted(machine.members.learners.items()) if machine else []
        totals, fates = machine.history.ledger.fates() if machine else (None, {})
        last = frozenset(machine.last_members if machine else ())
        learners = tuple(self._learner(now, one, machine, fates.get(one.name), last) for _, one in known)
        steps, overlap = (machine.steps_between_syncs, machine.overlap) if machine else (spread(()), spread(()))
        settings = machine.settings if machine else self._config.protocol
        progress = machine.progress if machine else 0.0
        phase = "waiting" if machine is None or machine.beginning.holds_back else PHASES[machine.phase]
        outer = [figures for of_fragment in self._outer.values() for figures in of_fragment]
        store, (evaluator, evaluator_at) = self.store(), self.evaluator()
        gaps = [b - a for a, b in zip(self._commits, list(self._commits)[1:], strict=False)]
        used_of_link, link_rate = measure_narrowest(machine)
        return RunStatus(
            run=run,
            phase=phase,
            elapsed_s=elapsed,
            left_s=self._estimate_left(now, progress) if phase != "training" or _anybody_steps(learners) else None,
            progress=progress,
            global_step=machine.global_step if machine else 0,
            round=machine.committed if machine else 0,
            fragments=settings.fragments,
            sync_every=settings.resolved_sync_every,
            synchronous=settings.synchronous,
            quorum=settings.quorum,
            members=machine.last_members if machine else (),
            reason=machine.last_reason if machine else "",
            effective_h=steps.median,
            effective_h_mean=steps.mean,
            effective_h_p95=steps.p95,
            **_training_phase(machine),
            grace_s=machine.grace_s if machine else 0.0,
            participation=sum(self._shares) / len(self._shares) if self._shares else None,
            goodput=self._goodput(now, machine),
            tokens=machine.members.total_tokens() if machine else 0,
            tokens_per_s=sum(one.tokens_per_s for one in learners),
            median_gap_s=median(gaps) if gaps else None,
            validation_loss=self._score.loss if self._score else None,
            validation_round=self._score.round if self._score else None,
            loss_unit=self._score.unit if self._score else "",
            metrics=self._score.metrics if self._score else {},
            directions=dict(self._score.directions) if self._score else {},
            budgeted=bool(settings.steps or settings.tokens),
            scorer=self.scorer,
            evaluator=evaluator,
            evaluator_at=evaluator_at,
            learners=learners,
            term=machine.history.term if machine else 0,
            cut=max(machine.history.cuts, default=None) if machine else None,
            alarm=self.alarm or next(reversed(self._rules_alarms.values()), ""),
            store=store.url if store is not None else "",
            store_rounds=store.rounds if store is not None else 0,
            store_known=store is None or store.known,
            store_s=round(store.seconds, 1) if store is not None else 0.0,
            store_alarm=f"the store fails: {store.trouble}" if store is not None and store.trouble else "",
            notice=self.notice()
            or self._nobody_here(now, phase, learners)
            or self.upload()
            or awaited_learners(machine)
            or describe_downloads(machine)
            or describe_first_steps(learners)
            or (gone_evaluator(evaluator, evaluator_at) if self.scorer and phase == "training" else ""),
            standby=self.standby(),
            disk_free_bytes=self.disk_free_bytes(),
            expected=settings.learners,
            data_parallel=self._config.data_parallel,
            supervised=self.supervised,
            liveness=self._time.liveness(now),
            bytes_in=traffic[0],
            bytes_out=traffic[1],
            relays=self.relays(),
            fates=totals.whole() if totals else {},
            dropped_by_cause=totals.by_cause() if totals else {},
            merged_share=totals.merged_share() if totals else None,
            rounds_merged=machine.history.merged_rounds if machine else 0,
            versions=tuple(machine.versions) if machine else (),
            codec=settings.codec,
            version_codec=settings.version_codec,
            share=settings.share,
            overlap=settings.overlap,
            overlap_steps=overlap.median,
            overlap_p95=overlap.p95,
            rounds_under_way=machine.rounds.interval.allowed if machine else 0,
            carried_h=machine.rounds.interval.steps * settings.fragments if machine else None,
            narrowest=describe_narrowest(machine) if machine else "",
            narrowest_used=used_of_link,
            narrowest_rate=link_rate,
            shortage=describe_shortage(machine) if machine else "",
            step_s=machine.members.step_s() if machine else None,
            rho=fmean(rho for rho, _ in outer) if outer else None,
            outer_step=fmean(step for _, step in outer) if outer else None,
            outer_lr=outer_of(machine.history).lr if machine else self._config.outer.lr,
        )

    def _estimate_left(self, now: float, progress: float) -> float | None:
        """By what was done since this syncer began to serve: of an earlier session the time is not known."""
        if self._began is None:
            return None
        if self._first_seen is None:
            self._first_seen = (now, progress)
        since, before = self._first_seen
        done, seconds = progress - before, (self._ended or now) - since
        return seconds * (1 - progress) / done if done > ENOUGH and seconds > 0 else None

    def _nobody_here(self, now: float, phase: str, learners: Sequence[LearnerStatus]) -> str:
        if not self.supervised:
            return nobody_here(phase, learners)
        if not is_deserted(phase, learners):
            self._deserted_since = None
            return ""
        self._deserted_since = self._deserted_since or now
        learners_meant = f"{self._learners} learner{'' if self._learners == 1 else 's'}"
        what = f"{processes} processes" if (processes := self._config.data_parallel) else learners_meant
        return nobody_started(what, now - self._deserted_since, joined=self._joined)

    def _goodput(self, now: float, machine: Syncer | None) -> float | None:
        """Return the goodput; None before the first step."""
        # Of this term alone, as the time is: what learners did before it may be hours.
        busy_s = sum(one.busy_in_term for one in machine.members.learners.values()) if machine else 0.0
        return self._time.goodput(busy_s, now) if busy_s else None

    def _learner(
        self, now: float, one: KnownLearner, machine: Syncer | None, fates: Totals | None, last: frozenset[str]
    ) -> LearnerStatus:
        """`last`: names of the members of the last round."""
        assert machine is not None
        life = machine.history.lives.get(one.name)
        quarantine = self._quarantines.get(one.name, "") if one.connected else ""
        state = _state(one, machine.phase)
        return LearnerStatus(
            learner=one.name,
            state="quarantined" if quarantine and state in RECOVERING else state,
            quarantine=quarantine,
            missing=_is_missing(one),
            incarnation=one.incarnation,
            step=one.t + (life.steps_before if life is not None else 0),
            tokens=one.tokens_before + one.tokens_total,
            tokens_per_s=self._rate(now, one),
            loss=one.loss,
            version_round=self._adopted(one),
            in_last_round=one.name in last,
            merged_share=fates.merged_share() if fates is not None else None,
            alarm=_alarm(one, machine) if one.connected else "",
            suspect=bool(one.suspect) and one.connected,
            agreement=one.agreement,
            influence=one.influence,
            tokens_per_step=one.declared,
            round_share=one.share,
            narrower_way=machine.rounds.interval.describe_way(one) if one.share < 1.0 else "",
            up_rate=one.up_rates[0],
            down_rate=one.down_rates[0],
            first_step_s=round(one.first_step_s, 1) if one.connected else 0.0,
            **_download(one),
        )

    def _adopted(self, one: KnownLearner) -> int:
        """The newest round whose version it has adopted."""
        rounds = [-1]
        for fragment, version in enumerate(one.versions):
            known = self._versions.get(fragment, ())
            place = bisect_right(known, version, key=_version)
            rounds += [known[place - 1][1]] if place else []
        return max(rounds)

    def _rate(self, now: float, one: KnownLearner) -> float:
        """Return the tokens per second over the last few looks."""
        seen = self._seen.setdefault(one.name, deque(maxlen=16))
        if not one.tokens:  # its first report since it connected brings the tokens of its absence
            seen.clear()
            return 0.0
        if seen and seen[-1][1] > one.tokens_total:
            seen.clear()
        if not seen or now - seen[-1][0] > 0.2:
            seen.append((now, one.tokens_total))
        (first, few), (last, many) = seen[0], seen[-1]
        return (many - few) / (last - first) if last > first else 0.0


def _anybody_steps(learners: Sequence[LearnerStatus]) -> bool:
    return any(one.state in STEPPING for one in learners)


def is_deserted(phase: str, learners: Sequence[LearnerStatus]) -> bool:
    """No learner is connected, and the run is not over."""
    return phase not in ("ending", "finished") and all(one.state in ("away", "gone") for one in learners)


def nobody_started(what: str, seconds: float, *, joined: bool) -> str:
    """A notice for a run of `atoll train` without connected learners: it starts them itself. `joined`: some were here
    since the syncer started. The time is told in steps that double, since a line is printed where it changes."""
    notice = f"Nobody is here: the supervisor restarts {what} …" if joined else f"Starting {what} …"
    if seconds < TOLD_S:
        return notice
    told_s = TOLD_S * 2 ** int(log2(seconds / TOLD_S))
    return f"{notice} for {told_s:.0f} s so far: scripts load, then connect (atoll logs RUN learner-0)"


def nobody_here(phase: str, learners: Sequence[LearnerStatus]) -> str:
    """The same for a run whose learners are started by hand."""
    if not is_deserted(phase, learners):
        return ""
    start = "start one with `atoll learn SCRIPT --join LINK`, or with `--syncer URL` on this machine"
    if not learners:
        return f"No learner has come yet: {start}."
    return f"Nobody is here: all {len(learners)} learners are away or gone, and the run waits until one comes; {start}."


def awaited_learners(machine: Syncer | None) -> str:
    """A notice while training waits for more learners; empty: it does not."""
    if machine is None or not (awaited := machine.run_start.awaited_learners):
        return ""
    settings = machine.settings
    some = f"{awaited} more of {settings.learners} learners"
    return f"Waiting for {some}, up to {settings.wait_for_learners_s:g} s; then training begins."


def describe_downloads(machine: Syncer | None) -> str:
    """Return a notice while learners fetch the run's parameters; empty: none does."""
    if machine is None or machine.phase not in ("empty", "running"):
        return ""
    joining = [one for one in machine.members.connected_learners() if one.state == "joining"]
    fetching = [(one.name, one.download) for one in joining if one.download.is_under_way]
    lines = [f"{name} fetches the run's parameters: {download.describe()}" for name, download in fetching[:SHOWN]]
    if len(fetching) > SHOWN:
        lines.append(f"{len(fetching) - SHOWN} more fetch them too")
    if machine.beginning.awaited:
        lines.insert(0, "Training begins once the learners hold version 0")
    return ". ".join(lines) + ("." if lines else "")


UNTOLD_STEPS = "if its optimizer steps already: does the script call learner.step() after each step?"


def describe_first_steps(learners: Sequence[LearnerStatus]) -> str:
    """Return a notice while learners are in their first step; empty: none is, or not for long."""
    starting = [one for one in learners if one.state == "starting" and one.first_step_s >= FIRST_STEP_S]
    if not starting:
        return ""
    longest_s = max(one.first_step_s for one in starting)
    names = ", ".join(one.learner for one in starting[:SHOWN])
    more = f" and {len(starting) - SHOWN} more" if len(starting) > SHOWN else ""
    return f"{names}{more}: first step: {longest_s:.0f} s so far (compiling?); {UNTOLD_STEPS}"


def gone_evaluator(here: bool | None, heard_at: float | None) -> str:
    """Return a notice while an evaluator is gone that was here."""
    if here is not False:
        return ""
    when = time.strftime("%H:%M:%S UTC", time.gmtime(heard_at))
    return f"No evaluator: the last left at {when}. Nothing is scored; `atoll learn SCRIPT --evaluator` starts another."


def describe_quarantine(reason: str, times: int, wait_s: float) -> str:
    """Return "16 of 16 values are not finite (3 times of late, each time for longer: now 20 s)"."""
    return f"{reason} ({times} times of late, each time for longer: now {wait_s:g} s)" if wait_s else reason


def _download(one: KnownLearner) -> dict[str, Any]:
    if not one.connected or one.state != "joining" or not one.download.is_under_way:
        return {}
    download = one.download
    return {
        "whole_bytes": download.whole,
        "lacking_bytes": download.lacking,
        "fetch_left_s": None if download.left_s is None else round(download.left_s, 1),
    }


def _training_phase(machine: Syncer | None) -> dict[str, Any]:
    if machine is None:
        return {}
    phase, phases = machine.history.training_phase, machine.settings.phases
    ends = phases[phase - 1].until if phase else 1.0
    told = [(asked, got) for asked, got in machine.rounds.earlier_h if got is not None]
    return {
        "training_phase": phase,
        "training_phases": len(phases),
        "phase_until": ends,
        "earlier_h": tuple(told),
    }


def describe_narrowest(machine: Syncer) -> str:
    """Name the part that makes H larger than was asked, and how much of it is used; empty if none does."""
    interval, step_s = machine.rounds.interval, machine.members.step_s()
    if interval.narrowest is None or step_s is None or machine.phase != "running":
        return ""
    return interval.narrowest.describe(interval.steps * step_s)


def measure_narrowest(machine: Syncer | None) -> tuple[float | None, float | None]:
    """Return the bytes per second that rounds take of the link that makes H larger, and those that it carries; None if
    no link does."""
    if machine is None or not describe_narrowest(machine):
        return None, None
    interval, step_s = machine.rounds.interval, machine.members.step_s()
    assert interval.narrowest is not None and step_s is not None, "it was described"
    return interval.narrowest.use_of_link(interval.steps * step_s) if interval.narrowest.nbytes else (None, None)


def describe_shortage(machine: Syncer) -> str:
    """Say in one sentence which part makes H larger than was asked, and what would hold it; empty if none does."""
    interval, settings, step_s = machine.rounds.interval, machine.settings, machine.members.step_s()
    if machine.phase != "running" or step_s is None:
        return ""
    if interval.lacks_memory and not settings.synchronous:
        return _describe_lacking_memory(interval, len(machine.members.stepping_learners()))
    if (narrowest := interval.narrowest) is None:
        return ""
    carried_h = HEADROOM * narrowest.seconds / step_s * settings.fragments
    used = narrowest.describe(interval.steps * step_s)
    if settings.synchronous:
        return f"{used}: its learners wait for it"
    fits = f"sync_every = {ceil(carried_h - 1e-6)} says as much"
    codecs, asked_s = (settings.codec, settings.version_codec), schedule.interval(settings) * step_s
    if smaller := _name_smaller_codecs(interval, narrowest.ways_s, codecs, asked_s):
        fits = f"{smaller} would hold H = {settings.sync_every}"
        if narrowest.is_small:
            fits = f"a narrow link or a busy processor, which atoll doctor tells apart; for a narrow link {fits}"
    return f"{used}: H is {carried_h:.3g} instead of {settings.sync_every}; {fits}"


def _name_smaller_codecs(
    interval: RoundInterval, ways_s: tuple[float, float], codecs: tuple[str, str], asked_s: float
) -> str:
    """Name the codecs with which a body takes each way at most `asked_s`; empty if a way is too narrow for all codecs.
    `ways_s`: seconds with the codecs of now."""
    named = []
    for name, own, way_s in zip(("codec", "version_codec"), codecs, ways_s, strict=True):
        body, times = interval.bodies.get(own, 0), HEADROOM * way_s / asked_s
        if times > 1:
            smaller = [codec for codec, size in interval.bodies.items() if size * times <= body]
            if not smaller:
                return ""
            named.append(f"{name} = {max(smaller, key=interval.bodies.__getitem__)}")
    return " and ".join(named)


def _describe_lacking_memory(interval: RoundInterval, learners: int) -> str:
    needed = ceil(interval.needed * max(1, learners) * interval.contribution_bytes / MIB)
    return (
        f"round_memory_mib allows {interval.affordable} rounds under way where {interval.needed} keep H: "
        f"round_memory_mib = {needed} would do"
    )


def manifest(machine: Syncer, plan: FragmentPlan, evaluate_every: int, shards: Sequence[str] = ()) -> bytes:
    """What an evaluator needs to assemble the model. `shards`: where the syncer's others are."""
    settings = machine.history.begun.settings
    return msgspec.json.encode(
        {
            "run": machine.history.run,
            "phase": machine.phase,
            "round": machine.committed,
            "plan": plan,
            "evaluate_steps": max(1, evaluate_every) * schedule.interval(settings),
            "frozen": machine.history.begun.frozen,
            "shards": shards,
            "codecs": (settings.codec, settings.version_codec),
            "least": machine.history.least,
        }
    )


def describe_score(score: ScoreReport) -> tuple[str, dict[str, object]]:
    found = [_told_figure("validation loss", score.loss)] if score.has_loss else []
    found += [_told_figure(one_line(name), value) for name, value in score.metrics.items()]
    data: dict[str, object] = {"round": score.round, "loss": score.loss, "cpu_s": score.cpu_s, "sample": score.sample}
    data["final"] = score.final
    if score.has_loss and score.loss is None:
        data["not_finite"] = True
    for name in ("metrics", "directions", "unit"):
        if value := getattr(score, name):
            data[name] = value
    return f"{', '.join(found)} at round {score.round}", data


def _told_figure(name: str, value: float | None) -> str:
    return f"{name} {'is not finite' if value is None else format_score(value, 5)}"


def _version(known: tuple[int, int]) -> int:
    return known[0]


def _alarm(one: KnownLearner, machine: Syncer) -> str:
    return f"{one.name} is suspect: {one.suspect}" if one.suspect else machine.contributions.shares.alarm(one)


def _state(one: KnownLearner, phase: str) -> str:
    """Return the word for a learner's state. One that left with its work done is "done"; one that may still come back
    with all its steps is "away"; one that left, or was away for too long, is "gone"."""
    if not one.connected:
        if phase == "finished" and one.stopped and not one.leaving:
            return "done"
        return "gone" if one.closed or one.left else "away"
    if one.stopped:
        return "stopped"
    if one.stalled and not (one.excused and one.starting):
        return "stalled"  # before "muted": a process that hangs answers no pulls either, and makes no steps
    if one.muted:
        return "muted"
    return "starting" if one.state == "training" and one.starting else one.state


def _is_missing(one: KnownLearner) -> bool:
    """Return whether a learner is not connected though it has not left and was not asked to. Of a life that was closed
    in an earlier term this syncer does not know why, so such a learner is not missing."""
    unknown = one.closed and not one.last_heard
    return not (one.connected or one.left or one.was_asked_to_leave or unknown)
