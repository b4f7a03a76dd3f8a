"""Getting around: `atoll ls`, the runs here; `atoll logs`, what their processes wrote."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.cli.shared import read_failure, read_summary, short
from atoll.observe.figures import NONE, count, plain, span
from atoll.observe.summary import summarise
from atoll.observe.tail import EventTail
from atoll.observe.timeline import find_closing
from atoll.protocol.errors import ConfigError
from atoll.protocol.statistics import format_score
from atoll.store.event_parts import events_size, read_lines
from atoll.store.rundir import RUNS, RunDir, find_compared, find_runs
from atoll.store.writer_lease import is_alive
from atoll.telemetry.events import parse

ListedState: TypeAlias = Literal["alive", "ended", "failed", "cut off"]
COLOURS = {"alive": "bold green", "ended": "", "failed": "red", "cut off": "yellow"}
LOOK_S = 0.25
"""Between two looks at a log that is followed."""
TAIL_BYTES = 1 << 20
"""Of the end of a log are read for its last lines."""
WHOLE_BYTES = 2 << 20
"""Of events are read for the figures of a run that has no summary; 0.2 s of processor time for each MiB."""


def ls(folder: Path | None, json_: bool) -> None:
    below = (folder,) if folder is not None else (Path(), RUNS)
    found = [run for place in below for run in (*find_runs(place), *find_compared(place))]
    rows = [describe_run(run, time.time()) for run in found]
    if json_:
        print(msgspec.json.encode(rows).decode())
        return
    console = Console()
    if not rows:
        console.print(
            f"There is no run in {folder or 'atoll-runs, and none here'}: atoll train starts one.", style="dim"
        )
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("run", "", "last word", "rounds", "tokens", "validation"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("rounds", "tokens", "validation") else "left"
        )
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def describe_run(run: RunDir, now: float) -> dict[str, Any]:
    """What can be said of a run at once, without reading all of its events."""
    figures = read_summary(run) or _figures_of_events(run)
    heard_at = run.events.stat().st_mtime if run.events.exists() else None
    return {
        "run": str(short(run.path)),
        "state": state_of(run),
        "ago_s": None if heard_at is None else max(0.0, now - heard_at),
        "rounds": figures.get("rounds"),
        "tokens": (figures.get("tokens") or {}).get("computed") if isinstance(figures.get("tokens"), dict) else None,
        "validation_loss": figures.get("validation_loss_end"),
        "reason": figures.get("reason"),
    }


def state_of(run: RunDir) -> ListedState:
    if is_alive(run.path):
        return "alive"
    if run.summary.exists():
        return "failed" if read_failure(run) else "ended"
    return "failed" if _came_to_its_end(run) else "cut off"


def _came_to_its_end(run: RunDir) -> bool:
    """Its syncer ended it. Without a summary that is a failure: nobody killed it, and nothing came of it."""
    return bool(find_closing(list(EventTail(run.events, most_bytes=TAIL_BYTES).new_events())))


def _figures_of_events(run: RunDir) -> dict[str, Any]:
    """Of one that has no summary: what its events come to, or, where they are many, what their end tells."""
    if 0 < events_size(run.events) <= WHOLE_BYTES:
        return dict(summarise(list(parse(read_lines(run.events)))))
    found: dict[str, Any] = {}
    for event in EventTail(run.events, most_bytes=TAIL_BYTES).new_events():
        if event["kind"] == "round":
            found["rounds"] = event["round"] + 1
        elif event["kind"] == "score":
            found["validation_loss_end"] = event.get("loss")
    return found


def _cells(row: dict[str, Any]) -> list[Text]:
    ago = NONE if row["ago_s"] is None else f"{span(row['ago_s'])} ago"
    rounds, tokens = (NONE if row[name] is None else count(row[name]) for name in ("rounds", "tokens"))
    state = Text(row["state"], COLOURS[row["state"]])
    return [
        Text(plain(row["run"])),
        state,
        *(Text(one) for one in (ago, rounds, tokens, format_score(row["validation_loss"]))),
    ]


def logs(run: Path, name: str | None, lines: int, follow: bool) -> None:
    place = RunDir(run.absolute())
    reader = LogReader(place.logs, name)
    if not reader.names():
        raise _no_logs(run, place, name)
    for one in reader.names():
        if name is None:
            print(f"==> {one} <==")
        print("".join(f"{line}\n" for line in reader.last_lines(one, lines)), end="", flush=True)
    while follow:
        alive = is_alive(place.path)  # asked first: what is written until then is printed below
        for one, line in reader.new_lines():
            print(line if name is not None else f"{one}: {line}", flush=True)
        if not alive:
            return
        time.sleep(LOOK_S)


def _no_logs(run: Path, place: RunDir, name: str | None) -> ConfigError:
    known = LogReader(place.logs, None).names()
    if known:
        return ConfigError(f"{run} has no log of {name!r}; there are {', '.join(known)}")
    if place.holds_run():
        return ConfigError(f"{run} has no logs: its processes were started by hand, and wrote to their own terminals")
    return ConfigError(f"{run} holds no run: name the folder that --out made (atoll ls)")


@dataclass
class LogReader:
    """The logs of a run, or of one of its processes, from where they were last read."""

    folder: Path
    name: str | None
    _offsets: dict[str, int] = field(default_factory=dict)

    def names(self) -> list[str]:
        found = sorted(path.stem for path in self.folder.glob("*.log")) if self.folder.is_dir() else []
        return [one for one in found if self.name in (None, one)]

    def last_lines(self, name: str, count: int) -> list[str]:
        """Of what is there now; `new_lines` goes on behind it."""
        path = self.folder / f"{name}.log"
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(size - file.tell())
        self._offsets[name] = size
        return _text(data).splitlines()[-count:] if count else []

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """Whole lines that were written since, by process; also of processes that have come since."""
        for name in self.names():
            with (self.folder / f"{name}.log").open("rb") as file:
                file.seek(self._offsets.get(name, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offsets[name] = self._offsets.get(name, 0) + len(whole) + 1
                yield from ((name, line) for line in _text(whole).splitlines())


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
