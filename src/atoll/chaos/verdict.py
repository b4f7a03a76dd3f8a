"""What must hold of a run under faults, and whether it did.

The injector wrote what it did to the run into the events. The verdict compares that with what the run says of itself: a
learner that was paused or slowed is not expected to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import msgspec

from atoll.observe.summary import Summary, summarise
from atoll.observe.timeline import (
    Span,
    find_stays,
    find_training_part,
    is_good_end,
    select_paced_rounds,
    take_share,
)
from atoll.protocol.errors import ConfigError
from atoll.protocol.ledger import FATES
from atoll.protocol.statistics import format_score
from atoll.telemetry.events import Event
from atoll.telemetry.round_members import names_all

SHORT_S = 2.0
"""A gap of this length is always allowed."""


class VerdictLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None: not asked for. Shares are fractions."""

    goodput: float | None = None
    """At least."""
    uptime: float | None = None
    """At least."""
    participation: float | None = None
    """Least mean over rounds of members over learners that were live, recovered, not paused, not slowed and had a
    turn."""
    tokens_per_live_s: float | None = None
    """At least, as a share of the calm run's: tokens per second of a learner that was live and not paused, slowed
    or leaving."""
    longest_gap: float | None = None
    """At most, in medians of the gaps between two rounds; but 2 s are always allowed. Outages of the syncer aside."""
    recovery_s: float | None = None
    """At most: from a learner's restart to its next contribution."""
    syncer_back_s: float | None = None
    """At most: from a death of the syncer to the next round."""
    loss: float | None = None
    """At most, as a share: the final validation loss above the calm run's at equal merged tokens."""
    ledger: bool = True
    """The ledger balances to zero."""
    verify: bool = True
    """`atoll verify` finds nothing."""
    unhandled: bool = True
    """No process ended by an error that nobody caused."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool) and not 0 <= value < float("inf"):
                raise ConfigError(f"verdict: {name} = {value:g} must be a number of 0 or more")

    @property
    def needs_calm(self) -> bool:
        """Whether a run without faults must stand beside it."""
        return self.tokens_per_live_s is not None or self.loss is not None


class Finding(msgspec.Struct, frozen=True):
    """One thing that was asked, and the answer."""

    name: str
    asked: str
    found: str
    ok: bool


def judge(
    limits: VerdictLimits,
    timeline: Sequence[Event],
    *,
    verified: str,
    logs: Sequence[str] = (),
    calm: Sequence[Sequence[Event]] = (),
) -> list[Finding]:
    """`verified`: what `atoll verify` has against the run; `logs`: tracebacks that were found in its logs; `calm`: runs
    in peace, whose mean the run is held against: one of them alone may be lucky."""
    summary = summarise(timeline)
    longest, usual = measure_gaps(timeline)
    found = [
        _least("goodput", limits.goodput, summary["goodput"]),
        _least("uptime", limits.uptime, summary["uptime"]),
        _least("participation of the able", limits.participation, measure_participation(timeline)),
        _least(
            "tokens per live second, of calm",
            limits.tokens_per_live_s,
            _ratio(measure_steps_per_live_s, timeline, calm),
        ),
        _gap(limits.longest_gap, longest, usual),
        _most("recovery of a learner, s", limits.recovery_s, _slowest(summary["recovery"])),
        _most("syncer back, s", limits.syncer_back_s, _back(timeline)),
        _loss(limits.loss, summary, [summarise(one) for one in calm]),
    ]
    if limits.ledger:
        found.append(_ledger(summary["tokens"], finished=any(event["kind"] == "finished" for event in timeline)))
    if limits.verify:
        found.append(Finding("verify", "nothing wrong", verified or "nothing wrong", not verified))
    if limits.unhandled:
        bad = [*find_unexplained(timeline), *logs]
        found.append(Finding("unhandled errors", "none", bad[0] if bad else "none", not bad))
    return [one for one in found if one is not None]


def _least(name: str, limit: float | None, value: float | None) -> Finding | None:
    if limit is None:
        return None
    return Finding(name, f"≥ {limit:.3g}", _text(value), value is not None and value >= limit)


def _most(name: str, limit: float | None, value: float | None) -> Finding | None:
    """What never happened is within any limit."""
    if limit is None:
        return None
    return Finding(
        name, f"≤ {limit:.3g}", _text(value) if value is not None else "none", value is None or value <= limit
    )


def _gap(limit: float | None, longest: float | None, usual: float | None) -> Finding | None:
    if limit is None:
        return None
    if longest is None or usual is None:
        return Finding("longest gap between rounds, s", f"≤ {limit:g} medians", "no rounds", False)
    most = max(SHORT_S, limit * usual)
    return Finding(
        "longest gap between rounds, s", f"≤ {most:.3g}", f"{longest:.3g} (median {usual:.3g})", longest <= most
    )


def _loss(limit: float | None, summary: Summary, calm: Sequence[Summary]) -> Finding | None:
    if limit is None:
        return None
    ours, losses = summary["validation_loss_end"], [one["validation_loss_end"] for one in calm]
    scored = [loss for loss in losses if loss is not None]
    if ours is None or not scored or len(scored) < len(losses):
        return Finding("loss above calm", f"≤ {100 * limit:.2g} %", "not scored", False)
    theirs = fmean(scored)
    above = ours / theirs - 1
    merged = summary["tokens"]["merged"] / max(1.0, fmean(one["tokens"]["merged"] for one in calm))
    runs = (
        f"calm {format_score(theirs, 5)}"
        if len(scored) == 1
        else f"{len(scored)} calm {format_score(min(scored), 5)} to {format_score(max(scored), 5)}"
    )
    text = f"{100 * above:+.2f} % ({format_score(ours, 5)}, {runs}, {100 * merged:.0f} % of the merged tokens)"
    return Finding("loss above calm", f"≤ {100 * limit:.2g} %", text, above <= limit)


def _ledger(tokens: dict[str, int], *, finished: bool) -> Finding:
    rest = tokens["computed"] - sum(tokens.get(fate, 0) for fate in FATES[1:])
    left = tokens["in_flight"] if finished else 0
    text = f"{rest} unaccounted, {left} in flight at the end"
    return Finding(
        "ledger", "0 unaccounted", text if finished else f"{text} (the run did not finish)", not rest and not left
    )


def _ratio(
    figure: Callable[[Sequence[Event]], float | None], timeline: Sequence[Event], calm: Sequence[Sequence[Event]]
) -> float | None:
    ours, theirs = figure(timeline), [figure(one) for one in calm]
    known = [one for one in theirs if one]
    return ours / fmean(known) if ours is not None and known and len(known) == len(theirs) else None


def _slowest(recoveries: list[dict[str, float | str | None]]) -> float | None:
    times = [one["seconds"] for one in recoveries if one["after"] == "restarted"]
    known = [float(seconds) for seconds in times if isinstance(seconds, int | float)]
    return max(known, default=None)


def _back(timeline: Sequence[Event]) -> float | None:
    times = [float("inf") if back is None else back - died for died, back in find_syncer_deaths(timeline)]
    return max(times, default=None)


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


# ---- what was done to the run ---------------------------------------------------------------------------------------

HINDERED = ("pause", "slow")
"""Faults that leave a learner alive but not able to step as it would."""
OUTAGES = ("syncer-pause", "disk-full", "disk-slow")
"""Faults in which the syncer itself can commit nothing, or only late."""
OF_ALL_TIME = float("inf")
ROGUE = "rogue-"
"""Whose name begins so is there to misbehave, and not missed."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault, from its beginning to its end."""

    what: str
    targets: tuple[str, ...]
    span: Span


def read_faults(timeline: Sequence[Event]) -> list[InjectedFault]:
    begun: dict[int, Event] = {}
    found: list[InjectedFault] = []
    for event in timeline:
        if event["kind"] == "fault":
            begun[event["number"]] = event
        elif event["kind"] == "mended" and (start := begun.pop(event["number"], None)) is not None:
            found.append(InjectedFault(start["what"], tuple(start["targets"]), Span(start["at"], event["at"])))
    return found + [
        InjectedFault(start["what"], tuple(start["targets"]), Span(start["at"], OF_ALL_TIME))
        for start in begun.values()
    ]


def find_hindered(timeline: Sequence[Event]) -> dict[str, list[Span]]:
    """Per learner, when it was paused or slowed."""
    found: dict[str, list[Span]] = defaultdict(list)
    for one in read_faults(timeline):
        if one.what in HINDERED:
            for name in one.targets:
                found[name].append(one.span)
    return found


def measure_participation(timeline: Sequence[Event]) -> float | None:
    """Mean over rounds of members over learners that were live, recovered, not paused and not slowed. A learner whose
    link carries only a share of the rounds counts in those that it is in."""
    there: dict[str, list[Span]] = defaultdict(list)
    for name, span in find_stays(timeline, ("recovered",), find_training_part(timeline).end):
        if not name.startswith(ROGUE):
            there[name].append(span)
    held = find_hindered(timeline)
    shares, turns = list[float](), dict[str, float]()
    paced = {id(event) for event in select_paced_rounds(timeline)}
    for event in timeline:
        take_share(turns, event)
        if id(event) not in paced or not names_all(event):
            continue
        members = {member["learner"] for member in event["members"]}
        able = {name for name, spans in there.items() if _in(event["at"], spans) and not _in(event["at"], held[name])}
        able -= {name for name, share in turns.items() if share < 1.0} - members
        if able:
            shares.append(len(members & able) / len(able))
    return fmean(shares) if shares else None


def measure_steps_per_live_s(timeline: Sequence[Event]) -> float | None:
    """Steps a second of a learner that was live, not hindered and not leaving, by the steps that rounds tell of.

    A learner that leaves has made its last step; it stays for up to P rounds more until its work is collected."""
    there: dict[str, list[Span]] = defaultdict(list)
    part = find_training_part(timeline)
    for name, span in find_stays(timeline, ("recovered",), part.end):
        there[name].append(span.within(part))
    held = find_hindered(timeline)
    leaves_at = {
        (event["learner"], event["incarnation"]): event["at"] for event in timeline if event["kind"] == "leaving"
    }
    seen: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for event in select_paced_rounds(timeline):
        for member in event["members"]:
            life = member["learner"], member["incarnation"]
            if not life[0].startswith(ROGUE) and event["at"] < leaves_at.get(life, OF_ALL_TIME):
                seen[life].append((event["at"], member["t"]))
    steps = seconds = 0.0
    for (name, _), samples in seen.items():
        for (before, few), (after, many) in pairwise(samples):
            between = Span(before, after)
            free = any(one.start <= before and after <= one.end for one in there[name])
            if free and not any(_overlap(between, one) for one in held[name]):
                steps += many - few
                seconds += between.length
    return steps / seconds if seconds else None


def measure_gaps(timeline: Sequence[Event]) -> tuple[float | None, float | None]:
    """The longest and the median time between two rounds, outages of the syncer aside."""
    rounds = [event["at"] for event in select_paced_rounds(timeline)]
    away = [Span(died, back if back is not None else OF_ALL_TIME) for died, back in find_syncer_deaths(timeline)]
    away += [one.span for one in read_faults(timeline) if one.what in OUTAGES]
    spans = [Span(a, b) for a, b in pairwise(rounds)]
    usual = [span.length for span in spans if not any(_overlap(span, one) for one in away)]
    return (max(usual), median(usual)) if usual else (None, None)


def find_syncer_deaths(timeline: Sequence[Event]) -> list[tuple[float, float | None]]:
    """When it was killed, and when the next round was told of."""
    found: list[tuple[float, float | None]] = []
    for place, event in enumerate(timeline):
        if event["kind"] == "killed" and event.get("process") == "syncer":
            later = (one["at"] for one in timeline[place:] if one["kind"] == "round")
            found.append((event["at"], next(later, None)))
    return found


BY_SIGTERM = (-15, 143)
"""What a learner ends with that a fault sends SIGTERM, before Atoll handles it or where the script does."""


def find_unexplained(timeline: Sequence[Event]) -> list[str]:
    """Processes that ended by an error nobody caused."""
    killed: dict[str, float] = {}
    found = []
    for event in timeline:
        name = event.get("process", "")
        if event["kind"] == "killed":
            killed[name] = event["at"]
        elif event["kind"] == "exited" and not is_good_end(event) and event["code"] not in BY_SIGTERM:
            if event["code"] == -9 and event["at"] - killed.pop(name, -OF_ALL_TIME) < 10:
                continue
            found.append(str(event["text"]))
    return found


def _in(at: float, spans: Sequence[Span]) -> bool:
    return any(span.start <= at <= span.end for span in spans)


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
