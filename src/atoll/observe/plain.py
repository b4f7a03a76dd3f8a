"""A run as plain lines, for a pipe, a log file or a terminal that cannot move its cursor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console

from atoll.observe.figures import NONE, clock, count, decimal, measure, percent, plain
from atoll.observe.notes import Notebook
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus


class PlainLines:
    """One line every few seconds, and notable events as they happen."""

    def __init__(self, console: Console, every_s: float = 5.0, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._every_s = every_s
        self._now = now
        self._due = float("-inf")
        self._notes = Notebook()
        self._last = ""

    def update(self, status: RunStatus | None, notes: Sequence[Event] = ()) -> None:
        for event in self._notes.take(notes):
            self._say(self._notes.line(event).plain)
        if status is None or self._now() < self._due:
            return
        self._due = self._now() + self._every_s
        line = status_line(status)
        if line != self._last:
            self._say(line)
            self._last = line

    def listens(self, link: str) -> None:
        """The syncer is there, and shows the run too."""
        self._say(f"dashboard: {link}")

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def status_line(status: RunStatus) -> str:
    """The run in one line."""
    if status.phase == "waiting":
        return f"{NONE:>7}  waiting for the first parameters, {len(status.learners)} learners here"
    here = max(len(status.members), sum(learner.state != "gone" for learner in status.learners))
    parts = [
        f"{clock(status.elapsed_s):>7}  {percent(status.progress):>5}  round {status.round:,}",
        f"{len(status.members)} of {here} learners in it",
        f"H {decimal(status.effective_h, 1)}/{status.sync_every}",
        f"goodput {percent(status.goodput)}",
        f"merged {percent(status.merged_share)}",
        f"{count(status.tokens_per_s)} tokens/s",
        f"validation {measure(status.validation_loss)}",
        *(f"{plain(name)} {measure(value)}" for name, value in status.metrics.items()),
        f"left {clock(status.left_s) if status.left_s is not None else NONE}",
    ]
    if status.phase != "training":
        parts.append(status.phase)
    return " · ".join(parts)
