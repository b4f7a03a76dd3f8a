"""Who was there when: from the events, the spans in which each learner was alive and in which it was stepping.

A learner is alive from `joined` until it is `lost` or has `left`, or until the supervisor says that its process was
`killed` or has `exited`, whichever comes first, or until everything is started again; it is stepping from `recovered`
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.telemetry.events import Event


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
            tuple(span.within(part) for _, span in stays(events, ("joined", "recovered"), part.end)),
            tuple(span.within(part) for _, span in stays(events, ("recovered",), part.end)),
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
    """A supervisor begins: one syncer that dies alone is `restarted`."""
    return event["kind"] == "started" and event.get("process") == "syncer"


def stays(events: Sequence[Event], openers: tuple[str, ...], end: float) -> list[tuple[str, Span]]:
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
