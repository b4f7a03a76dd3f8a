"""A run's folder as a report needs it: its events in order, its figures, its settings, and what is missing.

Figures are folded from the events, as `summary.json` is; the file itself is only asked where the events do not tell of
a run with a syncer (a data-parallel baseline, a tape).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from atoll.observe.presence import Span
from atoll.observe.summary import Summary, closing_of, in_its_own_time, summarise, training_part
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event, parse

State: TypeAlias = Literal["ended", "going on", "cut off"]

SILENT_S = 15.0
"""A syncer that has not moved its heartbeat or said anything for this long is not there any more."""


@dataclass(frozen=True, slots=True)
class Run:
    path: Path
    timeline: tuple[Event, ...]
    """In order of time, without the time in which the run lay still."""
    summary: Summary
    settings: str
    """run.toml as it lies there."""
    state: State
    missing: tuple[str, ...]
    """Sentences: what this report cannot say, and why."""
    part: Span
    """The training part, as the summary has it."""

    @property
    def end_s(self) -> float:
        """The last thing that is known, counted from the first parameters."""
        return max(0.0, self.timeline[-1]["at"] - self.part.start) if self.timeline else 0.0

    def at_s(self, event: Event) -> float:
        """When it was, counted from the first parameters, as everywhere."""
        return float(event["at"]) - self.part.start


def read(folder: Path, now: float | None = None) -> Run:
    """ConfigError where no run lies."""
    place = RunDir(folder.absolute())
    try:
        if not place.holds_run():
            raise ConfigError(f"{folder} holds no run: name the folder that --out made")
        lines = place.events.read_bytes().splitlines(keepends=True) if place.events.exists() else []
        told = _document(place.summary)
        settings = place.settings.read_text(errors="replace") if place.settings.exists() else ""
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error
    events = list(parse(lines))
    torn = sum(1 for line in lines if line.strip()) - len(events)
    under_way = bool(lines) and not lines[-1].endswith(b"\n")
    timeline = tuple(in_its_own_time(sorted(events, key=lambda event: float(event["at"]))))
    state = _state(place, timeline, told, time.time() if now is None else now)
    summary = _figures(timeline, told)
    if state != "ended":
        _leave_out_what_only_the_end_tells(summary)
    missing = [
        *_unsaid(state, place, timeline, told),
        *_torn_words(torn - 1 if state == "going on" and under_way else torn),
        *([] if settings else ["There is no run.toml."]),
    ]
    return Run(place.path, timeline, summary, settings, state, tuple(missing), training_part(timeline))


def _figures(timeline: Sequence[Event], told: dict[str, Any]) -> Summary:
    folded = summarise(timeline)
    if told and not any(event["kind"] in ("run", "round") for event in timeline):
        folded |= {key: value for key, value in told.items() if key in folded}
        folded["per_learner"] = folded["per_learner"] if isinstance(folded["per_learner"], dict) else {}
    return folded


def _leave_out_what_only_the_end_tells(summary: Summary) -> None:
    """Of those who were stepping when the events end, nobody said how long and on what."""
    summary |= {"goodput": None, "merged_share": None}
    summary["per_learner"] = {name: {**one, "busy_s": None} for name, one in summary["per_learner"].items()}


def _state(place: RunDir, timeline: Sequence[Event], told: dict[str, Any], now: float) -> State:
    has_syncer = any(event["kind"] in ("run", "reigned", "round", "finished") for event in timeline)
    if closing_of(timeline) or (told and not has_syncer):
        return "ended"
    moved = [path.stat().st_mtime for path in (place.journal / "alive", place.events) if path.exists()]
    return "going on" if now - max(moved, default=0.0) < SILENT_S else "cut off"


def _unsaid(state: State, place: RunDir, timeline: Sequence[Event], told: dict[str, Any]) -> list[str]:
    if state == "ended":
        return [] if told else ["There is no summary.json; the figures are from the events."]
    kinds = {event["kind"] for event in timeline}
    last = "the last word" if state == "cut off" else "now"
    found = [f"Figures are from the events up to {last}; the model's last score and the last steps are not in them."]
    if "round" in kinds:
        found.append(
            "Tokens: what was merged, and what the lost had not given, is known; dropped and in flight are not told "
            "apart, and steps since a learner's last contribution are not counted. "
            "Goodput and merged share are left out: learners say at their end how long they were stepping."
        )
    else:
        found.append("No round was committed: there is no participation, no effective H and no gap.")
    found.append("Bytes per token are said by the syncer when it ends.")
    if not place.model.exists():
        found.append("There is no model.safetensors: atoll export writes the newest version.")
    return found


def _torn_words(torn: int) -> list[str]:
    lines = "A line of events.jsonl is" if torn == 1 else f"{torn} lines of events.jsonl are"
    return [f"{lines} torn and left out."] if torn > 0 else []


def _document(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}
