"""A run's events as a timeline: its sessions, its training part, its rounds, and who was there when.

A learner is alive from `joined` until it is `lost` or has `left`, until the supervisor says that its process was
`killed` or has `exited`, or until everything is started again, whichever comes first. It is stepping from `recovered`
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan

from atoll.telemetry.events import Event

Incarnation = tuple[str, int]
"""A learner and its incarnation."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def within(self, other: Span) -> Span:
        start = min(max(self.start, other.start), other.end)
        return Span(start, max(start, min(self.end, other.end)))


@dataclass(frozen=True, slots=True)
class Presence:
    alive: tuple[Span, ...]
    """One span per stay of a learner, cut to the training part."""
    stepping: tuple[Span, ...]

    @classmethod
    def of(cls, timeline: Iterable[Event], part: Span) -> Presence:
        events = list(timeline)
        return cls(
            tuple(span.within(part) for _, span in find_stays(events, ("joined", "recovered"), part.end)),
            tuple(span.within(part) for _, span in find_stays(events, ("recovered",), part.end)),
        )

    def alive_s(self) -> float:
        return sum(span.length for span in self.alive)

    def stepping_s(self) -> float:
        """Seconds in which at least one was stepping."""
        total, reached = 0.0, float("-inf")
        for span in sorted(self.stepping):
            total += max(0.0, span.end - max(span.start, reached))
            reached = max(reached, span.end)
        return total

    def most_at_once(self) -> int:
        # Of two changes at one moment the departure comes first: a restart is no second learner.
        changes = sorted([(s.start, 1) for s in self.alive if s.length] + [(s.end, -1) for s in self.alive if s.length])
        most = now = 0
        for _, change in changes:
            now += change
            most = max(most, now)
        return most


def starts_everything(event: Event) -> bool:
    """A supervisor begins, or a syncer by hand: one that dies alone under a supervisor is `restarted`."""
    return event["kind"] == "started" and event.get("process") == "syncer"


def is_good_end(event: Event) -> bool:
    """Of an `exited`: it has done its work, or SIGTERM ended it before it joined. Nothing died, and nobody comes
    back."""
    return event.get("code") == 0 or bool(event.get("unjoined"))


def find_stays(events: Sequence[Event], openers: tuple[str, ...], end: float) -> list[tuple[str, Span]]:
    """Every learner's, from one of these events to the next that says it is gone."""
    found: list[tuple[str, Span]] = []
    open_since: dict[str, tuple[float, int]] = {}
    for event in events:
        match event["kind"]:
            case kind if kind in openers:
                learner, incarnation = event["learner"], event["incarnation"]
                since, before = open_since.get(learner, (event["at"], incarnation))
                if before < incarnation:
                    found.append((learner, Span(since, event["at"])))
                    since = event["at"]
                open_since[learner] = (since, incarnation)
            case "lost" | "left":
                # What is said of an old incarnation does not end the stay of a newer one.
                if open_since.get(event["learner"], (0.0, -1))[1] == event["incarnation"]:
                    found.append((event["learner"], Span(open_since.pop(event["learner"])[0], event["at"])))
            case "killed" | "exited" if (name := event.get("process")) in open_since:
                found.append((name, Span(open_since.pop(name)[0], event["at"])))
            case "started" if starts_everything(event):  # so nobody is left
                found += [(name, Span(since, event["at"])) for name, (since, _) in open_since.items()]
                open_since.clear()
    return found + [(name, Span(since, max(since, end))) for name, (since, _) in open_since.items()]


def remove_idle_time(timeline: Sequence[Event]) -> list[Event]:
    """Without the time in which it lay still: from the last event before it was started again until a learner trains. A
    first start does not count either."""
    idle, still_since, before, answer = 0.0, float("nan"), 0.0, []
    again = set(find_session_starts(timeline))
    for place, event in enumerate(timeline):
        if place in again and isnan(still_since):
            still_since = before
        if event["kind"] == "recovered" and not isnan(still_since):
            idle, still_since = idle + event["at"] - still_since, float("nan")
        at = event["at"] if isnan(still_since) else still_since
        before = event["at"]
        answer.append({**event, "at": at - idle} if at - idle != event["at"] else event)
    return answer


def find_session_starts(timeline: Iterable[Event]) -> list[int]:
    """The places of the events with which everything was started again; the first start is none."""
    starts, begun = list[int](), False
    for place, event in enumerate(timeline):
        if starts_everything(event):
            starts += [place] if begun else []
            begun = True
        begun = begun or event["kind"] == "run"
    return starts


def find_ending(timeline: Sequence[Event]) -> Event:
    """Where its end began; empty: it has not come to that, or went on since."""
    return _last_unless(timeline, "ending", ("reigned", "changed"))


def find_closing(timeline: Sequence[Event]) -> Event:
    """The event with which it ended; empty: it has not, or went on since."""
    return _last_unless(timeline, "finished", ("reigned", "round", "recovered"))


def _last_unless(timeline: Sequence[Event], kind: str, later: tuple[str, ...]) -> Event:
    """The last event of this kind, unless one of the kinds `later` or a start of everything comes behind it."""
    for event in reversed(timeline):
        if event["kind"] == kind:
            return event
        if event["kind"] in later or starts_everything(event):
            break
    return {}


def select_kinds(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["kind"] in kinds]


def find_training_part(timeline: Sequence[Event]) -> Span:
    start = (
        first_of_kind(timeline, "begun")
        or first_of_kind(timeline, "recovered")
        or first_of_kind(timeline, "run")
        or (timeline[0] if timeline else None)
    )
    if start is None:
        return Span(0.0, 0.0)
    rounds = select_kinds(timeline, "round")
    end = find_ending(timeline) or (rounds[-1] if rounds else timeline[-1])
    return Span(start["at"], max(start["at"], end["at"]))


def select_paced_rounds(timeline: Sequence[Event]) -> list[Event]:
    """The rounds before the drain."""
    paced, draining = [], False
    for event in timeline:
        if event["kind"] in ("ending", "reigned", "changed"):
            draining = event["kind"] == "ending"
        elif event["kind"] == "round" and not draining:
            paced.append(event)
    return paced


def take_share(shares: dict[str, float], event: Event) -> None:
    """Follow the share of the rounds that each learner takes part in; a learner that is not named takes part in all."""
    match event["kind"]:
        case "share":
            shares[event["learner"]] = float(event["share"])
        case "joined":  # over another connection, of which nothing was measured yet
            shares.pop(event["learner"], None)
        case "reigned":
            shares.clear()
        case "started" if starts_everything(event):
            shares.clear()


def find_incarnations(events: Iterable[Event]) -> set[Incarnation]:
    """Every incarnation that joined or was a member."""
    joined = {(e["learner"], e["incarnation"]) for e in select_kinds(events, "joined", "recovered")}
    return joined | {(m["learner"], m["incarnation"]) for e in select_kinds(events, "round") for m in e["members"]}


def first_of_kind(timeline: Iterable[Event], kind: str) -> Event | None:
    return next((event for event in timeline if event["kind"] == kind), None)
