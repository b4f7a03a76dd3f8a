"""What hit a run, whom, when, and how long it was until they contributed again.

One misfortune may be told several times: an injected kill is a `fault`, the process is `killed` and has `exited`, and
the syncer has `lost` its learner. Only the first is a fault of its own; a process that ends with code 0 is none. They
contribute again with the first round that has them once the fault is over and, if they were gone, once they have joined
anew. Where the syncer was hit, any round will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.observe.summary import closing_of, session_starts
from atoll.telemetry.events import Event

DEATHS = ("killed", "exited", "lost")
TROUBLE = ("refused", "quarantined", "muted", "stalled")
SYNCER = "syncer"


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    """The kind of its event; of an injected one, what it was."""
    whom: tuple[str, ...]
    text: str
    seconds: float | None
    """Until the last of them contributed again; None: never."""


def faults(timeline: Sequence[Event]) -> list[Fault]:
    dead: set[str] = set()
    injected: dict[int, tuple[str, ...]] = {}
    """Those that are not over yet, and whom they hit."""
    found = []
    again = set(session_starts(timeline))
    for place, event in enumerate(timeline):
        kind, whom = event["kind"], targets(event)
        if place in again and not closing_of(timeline[:place]):
            found.append(
                replace(_fault(timeline, place, "killed whole"), text="everything was killed; it was gone on with")
            )
        if kind in ("joined", "recovered", "restarted", "started"):
            dead.difference_update(whom)
        elif kind == "mended":
            injected.pop(event.get("number", 0), None)
        elif kind == "fault":
            injected[event.get("number", 0)] = whom
            found.append(_fault(timeline, place, str(event.get("what") or kind)))
        elif kind in DEATHS and event.get("code") != 0:
            if not dead.issuperset(whom) and not any(set(whom) <= set(hit) for hit in injected.values()):
                found.append(_fault(timeline, place, kind))
            dead.update(whom)
        elif kind in TROUBLE:
            found.append(_fault(timeline, place, kind))
    return found


def mended(timeline: Sequence[Event]) -> list[tuple[Event, tuple[str, ...]]]:
    """What came back or was over, and whom it concerned."""
    hit = {event.get("number", 0): targets(event) for event in timeline if event["kind"] == "fault"}
    back = [(event, targets(event)) for event in timeline if event["kind"] == "restarted"]
    return back + [(e, targets(e) or hit.get(e.get("number", 0), ())) for e in timeline if e["kind"] == "mended"]


def targets(event: Event) -> tuple[str, ...]:
    """Whom an event is about."""
    several = event.get("targets")
    one = event.get("learner") or event.get("process") or event.get("target")
    return tuple(map(str, several)) if several else (str(one),) if one else ()


def _fault(timeline: Sequence[Event], place: int, kind: str) -> Fault:
    event = timeline[place]
    whom = targets(event)
    waits = [_again(timeline, place, name) for name in whom or (SYNCER,)]
    known = [seconds for seconds in waits if seconds is not None]
    seconds = max(known) if len(known) == len(waits) else None
    return Fault(event["at"], kind, whom, str(event.get("text", "")), seconds)


def _again(timeline: Sequence[Event], place: int, name: str) -> float | None:
    fault = timeline[place]
    gone = fault["kind"] in DEATHS and name != SYNCER
    over = fault["at"] + float(fault.get("seconds") or 0.0)
    for at in range(place + 1, len(timeline)):
        event = timeline[at]
        if event["kind"] in (*DEATHS, "left") and name in targets(event) and name != SYNCER:
            gone = True
        elif event["kind"] == "joined" and event["learner"] == name:
            gone = False
        elif event["kind"] == "round" and not gone and event["at"] >= over and _in(event, name):
            return float(event["at"] - fault["at"])
    return None


def _in(event: Event, name: str) -> bool:
    return name == SYNCER or any(member["learner"] == name for member in event["members"])
