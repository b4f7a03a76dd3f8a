"""Which events are worth a line on a screen, and how the line looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from rich.text import Text

from atoll.observe.figures import NONE, clock, plain
from atoll.telemetry.events import Event

NOTABLE = {
    "alarm": "bold red",
    "restored": "bold red",
    "unbalanced": "bold red",
    "low_share": "bold red",
    "suspect": "bold red",
    "above": "bold yellow",
    "same_batches": "bold yellow",
    "chaos": "bold",
    "fault": "bold red",
    "mended": "dim",
    "killed": "bold red",
    "exited": "red",
    "lost": "red",
    "refused": "yellow",
    "quarantined": "bold yellow",
    "muted": "yellow",
    "stalled": "yellow",
    "warning": "yellow",
    "devices": "cyan",
    "passed": "yellow",
    "left": "cyan",
    "draining": "cyan",
    "leaving": "cyan",
    "restarted": "cyan",
    "joined": "cyan",
    "waiting": "cyan",
    "recovered": "green",
    "helped": "green",
    "fresh": "yellow",
    "reigned": "bold cyan",
    "changed": "cyan",
    "renewed": "cyan",
    "score": "magenta",
    "ending": "bold",
    "finished": "bold green",
}
"""Kinds of events that people want to hear of, with their colours. Rounds come too fast to be told one by one."""


ROUTINE = {"cut", "helped", "helping", "probed"}
AS_EXPECTED = {"exited": ("code", 0), "joined": ("incarnation", 1), "left": ("reason", "the run is over")}
"""A process has done its work; a learner comes for the first time, and `recovered` will tell of it; one goes at the end
of the run."""


def is_routine(event: Event) -> bool:
    """Whether it says only that all goes as it should: nobody has to read a line about that."""
    kind = str(event["kind"])
    if kind in AS_EXPECTED:
        field, value = AS_EXPECTED[kind]
        return bool(event.get(field) == value)
    return kind in ROUTINE


class Notebook:
    """The last few notable events. Scores in a row become one line, the newest."""

    def __init__(self, most: int = 6) -> None:
        self._lines: deque[Event] = deque(maxlen=most)
        self._origin: float | None = None
        """The first parameters: times count from there, as they do in the summary. What comes before has none."""

    def take(self, events: Iterable[Event]) -> Iterator[Event]:
        """Notes them, and gives back those that are notable."""
        for event in events:
            if self._origin is None and event["kind"] in ("recovered", "round"):
                self._origin = event["at"]
            if event["kind"] not in NOTABLE or is_routine(event):
                continue
            if event["kind"] == "score" and self._lines and self._lines[-1]["kind"] == "score":
                self._lines.pop()
            self._lines.append(event)
            yield event

    def last(self, most: int) -> list[Event]:
        return list(self._lines)[-most:] if most > 0 else []

    def line(self, event: Event) -> Text:
        begun = self._origin is not None and event["at"] >= self._origin
        time = clock(event["at"] - (self._origin or 0.0)) if begun else NONE
        kind = str(event["kind"])
        text = plain(str(event.get("text", "")))
        return Text.assemble((f"{time:>7}  ", "dim"), (f"{kind:<11} ", NOTABLE[kind]), text)
