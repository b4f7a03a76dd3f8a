"""Follow a run: read its events while others append them, pick the notable ones, and print plain lines.

`PlainLines` is for a pipe, a log file or a terminal that cannot move its cursor; screen.py draws the live screen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console
from rich.text import Text

from atoll.observe.figures import NONE, clock, count, decimal, listing, percent, plain
from atoll.protocol.statistics import format_score
from atoll.store.event_parts import events_size, open_parts, read_chunks
from atoll.telemetry.events import Event
from atoll.telemetry.status import AWAY, RunStatus

_CHUNK = 1 << 20
_ROUND = b'"kind":"round"'


class EventTail:
    """What has been appended since the last look. A last line that is still being written waits for the next one.

    `most_bytes`: what lies further back than this is passed over; `near_bytes`: so are rounds further back than this,
    which make up nearly all of a long file.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, near_bytes: int | None = None) -> None:
        self.path = path
        self._most_bytes, self._near_bytes = most_bytes, near_bytes
        self._offset = 0
        self._rest = b""

    def skip_to_end(self) -> None:
        """Pass over all that is there by now."""
        self._offset = events_size(self.path)

    def read_new(self) -> list[Event]:
        return list(self.new_events())

    def new_events(self) -> Iterator[Event]:
        """The same, without holding all of them at once."""
        with open_parts(self.path, self._offset) as parts:
            size = parts[-1].end if parts else 0
            self._skip_old(size)
            self._offset = max(self._offset, parts[0].begin if parts else 0)  # earlier parts may have been removed
            near = size - self._near_bytes if self._near_bytes is not None else 0
            for chunk in read_chunks(parts, self._offset):
                far = self._offset + len(chunk) < near
                self._offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                wanted = (line for line in lines if not (far and _ROUND in line[:64]))
                yield from (event for line in wanted if (event := _decode(line)) is not None)

    def _skip_old(self, size: int) -> None:
        if self._most_bytes is not None and size - self._offset > self._most_bytes:
            self._offset, self._rest = size - self._most_bytes, b""


def _decode(line: bytes) -> Event | None:
    """None for a line that was torn by a full disk or a kill: nothing a reader could mend."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "at" in event and "kind" in event else None


# ---- notable events -------------------------------------------------------------------------------------------------

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
    "moved": "dim",
    "refused": "yellow",
    "quarantined": "bold yellow",
    "muted": "yellow",
    "stalled": "yellow",
    "starting": "cyan",
    "warning": "yellow",
    "standstill": "yellow",
    "devices": "cyan",
    "passed": "yellow",
    "left": "cyan",
    "draining": "cyan",
    "leaving": "cyan",
    "restarted": "cyan",
    "joined": "cyan",
    "returned": "cyan",
    "waiting": "cyan",
    "fetching": "cyan",
    "begun": "green",
    "recovered": "green",
    "helped": "green",
    "fresh": "yellow",
    "reigned": "bold cyan",
    "relay": "cyan",
    "evaluator": "cyan",
    "changed": "cyan",
    "scaled": "cyan",
    "planned": "cyan",
    "phase": "cyan",
    "pace": "yellow",
    "share": "yellow",
    "renewed": "cyan",
    "score": "magenta",
    "ending": "bold",
    "closing": "cyan",
    "finished": "bold green",
}
"""Kinds of events that people want to hear of, with their colours. Rounds come too fast to be told one by one."""


ROUTINE = {"cut", "helped", "helping", "probed"}
AS_EXPECTED = {"exited": ("code", 0), "joined": ("incarnation", 1), "left": ("reason", "the run is over")}
"""A process has done its work; a learner comes for the first time, and `recovered` will tell of it; one goes at the end
of the run."""


NOTED_S = 2.0
"""A wait for the start of training that is worth a line."""


def is_routine(event: Event) -> bool:
    """Whether it says only that all goes as it should: nobody has to read a line about that."""
    kind = str(event["kind"])
    if kind in AS_EXPECTED:
        field, value = AS_EXPECTED[kind]
        return bool(event.get(field) == value)
    if kind == "begun":
        return bool(event.get("seconds", 0.0) < NOTED_S)
    return kind in ROUTINE


REPEATED = {"refused": 1, "quarantined": 1, "recovered": 2, "fresh": 1, "passed": 1, "standstill": 1}
"""Kinds that come by the hundred where numbers break again and again, or a machine is crowded: so many of them, by
learner, are printed …"""
QUIET_S, MOST_QUIET_S = 30.0, 480.0
"""… and then one in so many seconds, which says how many were not. While they go on, that time doubles up to this."""
FOLDED = REPEATED.keys() | {"left", "lost", "moved", "exited", "restarted", "joined"}
"""Kinds of which the screen shows one line, once more of them come …"""
APART = 2
"""… than so many, each within QUIET_S of the one before."""


@dataclass(slots=True)
class Fold:
    """Events of one kind, soon after each other."""

    first_at: float
    last_at: float
    number: int = 0
    names: set[str] = field(default_factory=set)
    """Whom they are about."""

    def add_event(self, event: Event) -> None:
        self.last_at, self.number = event["at"], self.number + 1
        if name := str(event.get("learner") or event.get("process") or ""):
            self.names.add(name)

    def describe(self, since: str) -> str:
        whose = f" of {listing(sorted(self.names))}" if self.names else ""
        return f"{self.number:,}{whose} since {since}"


@dataclass(slots=True)
class Repeats:
    """Events of one kind about one learner."""

    most: int
    """Lines in `quiet_s`."""
    quiet_s: float = QUIET_S
    lines: int = 0
    last_at: float = 0.0
    left_out: int = 0
    """Since the last line."""

    def has_line(self, at: float) -> bool:
        if at >= self.last_at + self.quiet_s:
            self.lines = min(self.lines, self.most - 1)
            self.quiet_s = min(MOST_QUIET_S, 2 * self.quiet_s) if self.left_out else QUIET_S
        if self.lines >= self.most:
            self.left_out += 1
            return False
        self.lines, self.last_at = self.lines + 1, at
        return True

    def with_count(self, event: Event) -> Event:
        count, self.left_out = self.left_out, 0
        return {**event, "text": f"{event.get('text', '')} (and {count:,} more before it)"} if count else event


class NotableEvents:
    """The last notable events. Scores in a row become one line, the newest, and so do others that repeat themselves:
    what came between them stays in sight."""

    def __init__(self, most: int = 40) -> None:
        self._lines: deque[Event] = deque(maxlen=most)
        self._origin: float | None = None
        """The first parameters: times count from there, as they do in the summary. What comes before has none."""
        self._repeats: dict[tuple[str, str], Repeats] = {}
        self._folds: dict[str, Fold] = {}

    def take_events(self, events: Iterable[Event]) -> Iterator[Event]:
        """Notes them, and gives back those that have a line where each is printed once."""
        for event in events:
            if self._origin is None and event["kind"] in ("recovered", "round"):
                self._origin = event["at"]
            if event["kind"] not in NOTABLE or is_routine(event):
                continue
            if event.get("moved"):
                event = {**event, "kind": "moved"}
            self._note_line(event)
            if event["kind"] in REPEATED:
                key = (str(event["kind"]), str(event.get("learner", "")))
                repeats = self._repeats.setdefault(key, Repeats(REPEATED[key[0]]))
                if not repeats.has_line(event["at"]):
                    continue
                event = repeats.with_count(event)
            yield event

    def _note_line(self, event: Event) -> None:
        if event["kind"] == "score" and self._lines and self._lines[-1]["kind"] == "score":
            self._lines.pop()
        if event["kind"] in FOLDED:
            self._note_folded(event)
        else:
            self._lines.append(event)

    def _note_folded(self, event: Event) -> None:
        """Where it repeats others, it has one line with them, where the first of these is: lines do not jump."""
        kind, at = str(event["kind"]), event["at"]
        fold = self._folds.get(kind)
        if fold is None or at >= fold.last_at + QUIET_S:
            fold = self._folds[kind] = Fold(at, at)
        fold.add_event(event)
        same = [n for n, line in enumerate(self._lines) if line["kind"] == kind and line["at"] >= fold.first_at]
        if fold.number <= APART or not same:
            self._lines.append(event)
            return
        for place in reversed(same[1:]):
            del self._lines[place]
        since = fold.describe(self._tell_time(fold.first_at))
        self._lines[same[0]] = {**event, "text": f"{since}; the last: {event.get('text', '')}"}

    def list_newest(self, most: int) -> list[Event]:
        return list(self._lines)[-most:] if most > 0 else []

    def render_line(self, event: Event) -> Text:
        return self._render_head(event).append(plain(str(event.get("text", ""))))

    def wrap_line(self, event: Event, console: Console, rows: int) -> list[Text]:
        """The same on at most so many rows; what does not fit is cut."""
        head = self._render_head(event)
        body = Text(plain(str(event.get("text", "")))).wrap(console, max(1, console.width - head.cell_len))
        rest = Text(" ".join(line.plain.rstrip() for line in body[rows - 1 :]))
        lines = [*body[: rows - 1], rest]
        heads = [head, *[Text(" " * head.cell_len)] * (len(lines) - 1)]
        whole = [Text.assemble(*both) for both in zip(heads, lines, strict=True)]
        for line in whole:
            line.no_wrap, line.overflow = True, "ellipsis"
        return whole

    def _render_head(self, event: Event) -> Text:
        kind = str(event["kind"])
        return Text.assemble((f"{self._tell_time(event['at']):>7}  ", "dim"), (f"{kind:<11} ", NOTABLE[kind]))

    def _tell_time(self, at: float) -> str:
        return clock(at - self._origin) if self._origin is not None and at >= self._origin else NONE


# ---- plain lines ----------------------------------------------------------------------------------------------------


class PlainLines:
    """One line every few seconds, and notable events as they happen."""

    def __init__(self, console: Console, every_s: float = 5.0, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._every_s = every_s
        self._now = now
        self._due = float("-inf")
        self._notes = NotableEvents()
        self._last = ""

    def update(self, status: RunStatus | None, notes: Sequence[Event] = ()) -> None:
        for event in self._notes.take_events(notes):
            self._print_line(self._notes.render_line(event).plain)
        if status is None or self._now() < self._due:
            return
        self._due = self._now() + self._every_s
        line = status_line(status)
        if line != self._last:
            self._print_line(line)
            self._last = line

    def show_link(self, link: str) -> None:
        """The syncer is there, and shows the run too."""
        self._print_line(f"dashboard: {link}")

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _print_line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class Comings:
    """Says on a syncer's terminal who comes and goes, what goes wrong, how far the run is and how it was scored. A
    thread of its own reads the events: a terminal that is held (Ctrl-S), or a pipe that nobody reads, does not hold up
    the run."""

    KINDS = ("joined", "lost", "left", "relay", "evaluator", "alarm", "score", "quarantined")

    def __init__(
        self,
        events: Path,
        console: Console,
        every_s: float = 0.25,
        line_s: float = 30.0,
        *,
        takes_over: bool = False,
    ) -> None:
        """What is in the events by now is of earlier sessions. `takes_over`: so is what comes before this syncer's
        first event, which a standby waits for. `line_s`: seconds between two lines of progress."""
        self._tail, self._console, self._every_s = EventTail(events, most_bytes=_CHUNK), console, every_s
        self._tail.skip_to_end()
        self._takes_over = takes_over
        self._progress = PlainLines(console, line_s)
        self._repeated = NotableEvents()
        """Counts quarantines, which come by the hundred where numbers break again and again."""
        self._status: RunStatus | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def note_status(self, status: RunStatus) -> None:
        self._status = status

    def start(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="atoll-comings", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = 2.0) -> None:
        """What is still to be said is said, unless nobody reads it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _follow(self) -> None:
        while not self._over.wait(self._every_s):
            self._say_new()
        self._say_new()

    def _say_new(self) -> None:
        lines: list[str] = []
        for event in self._tail.new_events():
            kind = event["kind"]
            if kind == "reigned" and self._takes_over:
                lines = [f"takes over in term {event['term']}: the run goes on at round {event['round']}"]
            elif kind == "quarantined":
                told = self._repeated.take_events([event])
                lines += [f"{one['text']}: {one.get('reason', 'its numbers are broken')}" for one in told]
            elif kind in self.KINDS and (kind == "joined" or not is_routine(event)):
                alarm = kind == "alarm" and not event.get("over")
                lines.append(f"ALARM: {event['text']}" if alarm else str(event["text"]))
        for line in lines:
            self._console.print(plain(line), markup=False, highlight=False, emoji=False, soft_wrap=True)
        if self._status is not None and self._status.phase != "waiting":
            self._progress.update(self._status)


def describe_presence(status: RunStatus) -> str:
    """How many are connected, of those that the run is meant for, and how many of these make no steps."""
    here = sum(learner.state not in AWAY for learner in status.learners)
    if status.data_parallel:
        return f"data-parallel, {status.data_parallel} processes{'' if here else ', none here'}"
    meant = max(status.expected, here)
    stalled = sum(learner.state == "stalled" for learner in status.learners)
    return f"{here} of {meant} learner{'' if meant == 1 else 's'} here{f', {stalled} stalled' if stalled else ''}"


def _has_parameters(status: RunStatus) -> bool:
    return bool(status.versions) and min(status.versions) >= 0


def _narrowest(status: RunStatus) -> str:
    return f" ({plain(status.narrowest)})" if status.narrowest else ""


NO_STEP = "no one has stepped yet"


def status_line(status: RunStatus) -> str:
    """The run in one line."""
    if status.phase == "waiting":
        here = len(status.learners)
        what = "all learners to hold version 0" if _has_parameters(status) else "the first parameters"
        told = f"waiting for {what}, {here} learner{'' if here == 1 else 's'} here"
        return f"{NONE:>7}  {told}{f' · {plain(status.notice)}' if status.notice else ''}"
    spent = f"  {percent(status.progress):>5}" if status.budgeted else ""
    parts = [
        f"{clock(status.elapsed_s):>7}{spent}  round {status.round:,}",
        describe_presence(status),
        f"H {decimal(status.effective_h, 1)}/{status.sync_every}{_narrowest(status)}",
        f"goodput {NO_STEP if status.goodput is None else percent(status.goodput)}",
        f"merged {percent(status.merged_share)}",
        f"{count(status.tokens_per_s)} tokens/s",
        f"validation {format_score(status.validation_loss)}",
        *(f"{plain(name)} {format_score(value)}" for name, value in status.metrics.items()),
    ]
    if status.budgeted:
        parts.append(f"left {clock(status.left_s) if status.left_s is not None else NONE}")
    if status.phase != "training":
        parts.append(status.phase)
    elif status.goodput is None and status.notice:
        parts.append(plain(status.notice))
    return " · ".join(parts)
