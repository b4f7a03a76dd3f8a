"""What was done to a run, by the events that the injector wrote, held against what the run says of itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from atoll.observe.timeline import Span, paced_rounds, stays, training_part
from atoll.telemetry.events import Event

HINDERED = ("pause", "slow")
"""Faults that leave a learner alive but not able to step as it would."""
OUTAGES = ("syncer-pause", "disk-full", "disk-slow")
"""Faults in which the syncer itself can commit nothing, or only late."""
OF_ALL_TIME = float("inf")
ROGUE = "rogue-"
"""Whose name begins so is there to misbehave, and not missed."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault, from its beginning to its end."""

    what: str
    targets: tuple[str, ...]
    span: Span


def faults(timeline: Sequence[Event]) -> list[Done]:
    begun: dict[int, Event] = {}
    found: list[Done] = []
    for event in timeline:
        if event["kind"] == "fault":
            begun[event["number"]] = event
        elif event["kind"] == "mended" and (start := begun.pop(event["number"], None)) is not None:
            found.append(Done(start["what"], tuple(start["targets"]), Span(start["at"], event["at"])))
    return found + [
        Done(start["what"], tuple(start["targets"]), Span(start["at"], OF_ALL_TIME)) for start in begun.values()
    ]


def hindered(timeline: Sequence[Event]) -> dict[str, list[Span]]:
    """Per learner, when it was paused or slowed."""
    found: dict[str, list[Span]] = defaultdict(list)
    for one in faults(timeline):
        if one.what in HINDERED:
            for name in one.targets:
                found[name].append(one.span)
    return found


def participation(timeline: Sequence[Event]) -> float | None:
    """Mean over rounds of members over learners that were live, recovered, not paused and not slowed."""
    there: dict[str, list[Span]] = defaultdict(list)
    for name, span in stays(timeline, ("recovered",), training_part(timeline).end):
        if not name.startswith(ROGUE):
            there[name].append(span)
    held = hindered(timeline)
    shares = []
    for event in paced_rounds(timeline):
        able = {name for name, spans in there.items() if _in(event["at"], spans) and not _in(event["at"], held[name])}
        if able:
            members = {member["learner"] for member in event["members"]}
            shares.append(len(members & able) / len(able))
    return fmean(shares) if shares else None


def steps_per_live_s(timeline: Sequence[Event]) -> float | None:
    """Steps a second of a learner that was live, not hindered and not leaving, by the steps that rounds tell of.

    A learner that leaves has made its last step; it stays for up to P rounds more until its work is collected."""
    there: dict[str, list[Span]] = defaultdict(list)
    part = training_part(timeline)
    for name, span in stays(timeline, ("recovered",), part.end):
        there[name].append(span.within(part))
    held = hindered(timeline)
    leaves_at = {
        (event["learner"], event["incarnation"]): event["at"] for event in timeline if event["kind"] == "leaving"
    }
    seen: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for event in paced_rounds(timeline):
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


def gaps(timeline: Sequence[Event]) -> tuple[float | None, float | None]:
    """The longest and the median time between two rounds, outages of the syncer aside."""
    rounds = [event["at"] for event in paced_rounds(timeline)]
    away = [Span(died, back if back is not None else OF_ALL_TIME) for died, back in syncer_deaths(timeline)]
    away += [one.span for one in faults(timeline) if one.what in OUTAGES]
    spans = [Span(a, b) for a, b in pairwise(rounds)]
    usual = [span.length for span in spans if not any(_overlap(span, one) for one in away)]
    return (max(usual), median(usual)) if usual else (None, None)


def syncer_deaths(timeline: Sequence[Event]) -> list[tuple[float, float | None]]:
    """When it was killed, and when the next round was told of."""
    found: list[tuple[float, float | None]] = []
    for place, event in enumerate(timeline):
        if event["kind"] == "killed" and event.get("process") == "syncer":
            later = (one["at"] for one in timeline[place:] if one["kind"] == "round")
            found.append((event["at"], next(later, None)))
    return found


def unexplained(timeline: Sequence[Event]) -> list[str]:
    """Processes that ended by an error nobody caused."""
    killed: dict[str, float] = {}
    found = []
    for event in timeline:
        name = event.get("process", "")
        if event["kind"] == "killed":
            killed[name] = event["at"]
        elif event["kind"] == "exited" and event["code"] not in (0, 143, -15):
            if event["code"] == -9 and event["at"] - killed.pop(name, -OF_ALL_TIME) < 10:
                continue
            found.append(str(event["text"]))
    return found


def _in(at: float, spans: Sequence[Span]) -> bool:
    return any(span.start <= at <= span.end for span in spans)


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
