"""A run's folder as a report needs it: its events in order, its figures, its settings, and what is missing.

Figures are folded from the events and the account in the journal, as `summary.json` is; the file itself is only asked
where the events do not tell of a run with a syncer (a tape, a data-parallel run of an earlier version).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from atoll.observe.summary import Summary, summarise
from atoll.observe.timeline import (
    Span,
    find_closing,
    find_session_starts,
    find_training_part,
    is_good_end,
    remove_idle_time,
)
from atoll.protocol.errors import ConfigError
from atoll.store.event_parts import read_lines
from atoll.store.head import read_account
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event, parse
from atoll.telemetry.round_members import names_all

ReportedState: TypeAlias = Literal["ended", "going on", "cut off"]

SILENT_S = 15.0
"""A syncer that has not moved its heartbeat or said anything for this long is not there any more."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    path: Path
    timeline: tuple[Event, ...]
    """In order of time, without the time in which the run lay still."""
    summary: Summary
    settings: str
    """run.toml as it lies there."""
    state: ReportedState
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


def read_run(folder: Path, now: float | None = None) -> ReportedRun:
    """ConfigError where no run lies."""
    place = RunDir(folder.absolute())
    try:
        if not place.holds_run():
            raise ConfigError(f"{folder} holds no run: name the folder that --out made")
        lines = read_lines(place.events)
        told = _document(place.summary)
        settings = place.settings.read_text(errors="replace") if place.settings.exists() else ""
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error
    events = list(parse(lines))
    torn = sum(1 for line in lines if line.strip()) - len(events)
    under_way = bool(lines) and not lines[-1].endswith(b"\n")
    timeline = tuple(remove_idle_time(sorted(events, key=lambda event: float(event["at"]))))
    state = _state(place, timeline, told, time.time() if now is None else now)
    summary = _figures(timeline, told, {} if find_closing(timeline) else read_account(place))
    if state != "ended":
        _leave_out_what_only_the_end_tells(summary)
    missing = [
        *_unsaid(state, place, timeline, told),
        *_torn_words(torn - 1 if state == "going on" and under_way else torn),
        *([] if settings else ["There is no run.toml."]),
    ]
    return ReportedRun(place.path, timeline, summary, settings, state, tuple(missing), find_training_part(timeline))


def _figures(timeline: Sequence[Event], told: dict[str, Any], account: dict[str, Any]) -> Summary:
    folded = summarise(timeline, account)
    if "tape" in told:
        folded |= {"goodput": told.get("goodput"), "tape": told["tape"]}
    if told and not any(event["kind"] in ("run", "round") for event in timeline):
        folded["rounds_closed"] = told.get("rounds", 0)
        folded |= {key: value for key, value in told.items() if key in folded}
        folded["per_learner"] = folded["per_learner"] if isinstance(folded["per_learner"], dict) else {}
    return folded


def _leave_out_what_only_the_end_tells(summary: Summary) -> None:
    """Remove the figures of learners that were stepping when the events end: no event has their time."""
    summary["goodput"] = None
    summary["per_learner"] = {name: {**one, "busy_s": None} for name, one in summary["per_learner"].items()}


def _state(place: RunDir, timeline: Sequence[Event], told: dict[str, Any], now: float) -> ReportedState:
    has_syncer = any(event["kind"] in ("run", "reigned", "round", "finished") for event in timeline)
    if find_closing(timeline) or (told and not has_syncer):
        return "ended"
    moved = [path.stat().st_mtime for path in (place.journal / "alive", place.events) if path.exists()]
    return "going on" if now - max(moved, default=0.0) < SILENT_S else "cut off"


def _unsaid(state: ReportedState, place: RunDir, timeline: Sequence[Event], told: dict[str, Any]) -> list[str]:
    if state == "ended":
        return [] if told else ["There is no summary.json; the figures are from the events."]
    kinds = {event["kind"] for event in timeline}
    last = "the last word" if state == "cut off" else "now"
    found = [f"Figures are from the events up to {last}; the model's last score and the last steps are not in them."]
    if "round" in kinds:
        found.append(
            "Tokens and rounds are as the journal has them: steps since a learner's last contribution are not counted. "
            "Goodput is left out: learners say at their end how long they were stepping."
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


# ---- faults ---------------------------------------------------------------------------------------------------------

DEATHS = ("killed", "exited", "lost")
TROUBLE = ("refused", "quarantined", "muted", "stalled")
SYNCER = "syncer"


@dataclass(frozen=True, slots=True)
class ReportedFault:
    at: float
    kind: str
    """The kind of its event; of an injected one, what it was."""
    whom: tuple[str, ...]
    text: str
    seconds: float | None
    """Until the last of them contributed again; None: never."""


def find_faults(timeline: Sequence[Event]) -> list[ReportedFault]:
    """What hit a run, whom, when, and how long it was until they contributed again.

    One fault may be in several events: an injected kill is a `fault`, the process is `killed` and has `exited`, and the
    syncer has `lost` its learner. Only the first counts; a good end is no fault. A learner contributes again
    with its first round after the fault is over and, if it was gone, after it joined anew. For the syncer any round
    counts.
    """
    dead: set[str] = set()
    injected: dict[int, tuple[str, ...]] = {}
    """Those that are not over yet, and whom they hit."""
    found = []
    again = set(find_session_starts(timeline))
    for place, event in enumerate(timeline):
        kind, whom = event["kind"], targets(event)
        if place in again and not find_closing(timeline[:place]):
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
        elif kind in DEATHS and not is_good_end(event) and not event.get("moved"):
            if not dead.issuperset(whom) and not any(set(whom) <= set(hit) for hit in injected.values()):
                found.append(_fault(timeline, place, kind))
            dead.update(whom)
        elif kind in TROUBLE:
            found.append(_fault(timeline, place, kind))
    return found


def find_recoveries(timeline: Sequence[Event]) -> list[tuple[Event, tuple[str, ...]]]:
    """What came back or was over, and whom it concerned."""
    hit = {event.get("number", 0): targets(event) for event in timeline if event["kind"] == "fault"}
    back = [(event, targets(event)) for event in timeline if event["kind"] == "restarted"]
    return back + [(e, targets(e) or hit.get(e.get("number", 0), ())) for e in timeline if e["kind"] == "mended"]


def targets(event: Event) -> tuple[str, ...]:
    """Whom an event is about."""
    several = event.get("targets")
    one = event.get("learner") or event.get("process") or event.get("target")
    return tuple(map(str, several)) if several else (str(one),) if one else ()


def _fault(timeline: Sequence[Event], place: int, kind: str) -> ReportedFault:
    event = timeline[place]
    whom = targets(event)
    waits = [_again(timeline, place, name) for name in whom or (SYNCER,)]
    known = [seconds for seconds in waits if seconds is not None]
    seconds = max(known) if len(known) == len(waits) else None
    return ReportedFault(event["at"], kind, whom, str(event.get("text", "")), seconds)


def _again(timeline: Sequence[Event], place: int, name: str) -> float | None:
    """Return the seconds until the first round that names it. A round of many learners does not name all its members,
    but a new life in its first round. So where the same life goes on, and no later round that names all tells, the
    first round that may have held it counts."""
    fault, perhaps_s, new_life = timeline[place], None, False
    gone = fault["kind"] in DEATHS and name != SYNCER
    over = fault["at"] + float(fault.get("seconds") or 0.0)
    for at in range(place + 1, len(timeline)):
        event = timeline[at]
        if event["kind"] in (*DEATHS, "left") and name in targets(event) and name != SYNCER:
            gone = True
        elif event["kind"] == "joined" and event["learner"] == name:
            gone, new_life, perhaps_s = False, True, None
        elif event["kind"] == "round" and not gone and event["at"] >= over:
            seconds = float(event["at"] - fault["at"])
            if _in(event, name):
                return seconds
            if names_all(event):
                perhaps_s = None
            elif perhaps_s is None and not new_life:
                perhaps_s = seconds
    return None if gone else perhaps_s


def _in(event: Event, name: str) -> bool:
    return name == SYNCER or any(member["learner"] == name for member in event["members"])
