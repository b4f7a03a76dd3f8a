"""The goodput simulator's results as terminal tables, CSV rows and pictures, and a profile measured from a real run.

The profile comes from the run's events alone: how long a step takes and how much of it is work, how often a process
died while it stepped, how long each death kept it from stepping, and how late each learner began. The run's goodput is
not an input: the simulator predicts it, and the prediction is compared with the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from rich.table import Table

from atoll.estimate.calibration import Miss
from atoll.estimate.chips import TimeSpan
from atoll.estimate.goodput import Cell, Job
from atoll.estimate.profile import YEAR_S, Elasticity, Failures, Profile, RoundRules, Speed
from atoll.observe import plots
from atoll.observe.figures import table
from atoll.observe.summary import summarise, work_done
from atoll.observe.timeline import Span, find_stays, find_training_part, remove_idle_time
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event

NAMES = {
    "data-parallel": "data-parallel",
    "elastic-data-parallel": "elastic data-parallel",
    "synchronous-diloco": "synchronous DiLoCo",
    "streaming-diloco": "streaming DiLoCo",
    "decoupled": "decoupled",
}
HEADLINE_LOSSES = 2
"""The largest reasons that a line of the terminal names."""
LANES = 64


def rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Flat, for CSV: an interval is two columns, every reason for lost time one."""
    found: list[dict[str, Any]] = []
    reasons = sorted({reason for cell in cells for reason in cell.lost})
    for cell in cells:
        row: dict[str, Any] = {}
        for name, value in msgspec.to_builtins(cell).items():
            if name.endswith("_interval"):
                low, high = value or (None, None)
                row[name.replace("_interval", "_low")], row[name.replace("_interval", "_high")] = low, high
            elif name != "lost":
                row[name] = value
        found.append(row | {f"lost: {reason}": cell.lost.get(reason, 0.0) for reason in reasons})
    return found


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Goodput and uptime over sizes; what is behind them, for the largest."""
    largest = max(cell.chips for cell in cells)
    return [
        _over_sizes("goodput % by chips, ± its 95 % interval", cells, _goodput),
        _over_sizes("uptime % by chips", cells, lambda cell: f"{100 * cell.uptime:.1f}"),
        _behind(f"on {short(largest)} chips", [cell for cell in cells if cell.chips == largest]),
    ]


def _over_sizes(title: str, cells: Sequence[Cell], text: Callable[[Cell], str]) -> Table:
    sizes = sorted({cell.chips for cell in cells})
    made = table(title, "method", "M", *(short(size) for size in sizes))
    for method, learners in dict.fromkeys((cell.method, cell.learners) for cell in cells):
        found = {cell.chips: cell for cell in cells if (cell.method, cell.learners) == (method, learners)}
        made.add_row(NAMES[method], str(learners), *(text(found[size]) if size in found else "" for size in sizes))
    return made


def _behind(title: str, cells: Sequence[Cell]) -> Table:
    spread = any(cell.merged_share_slowest is not None for cell in cells)
    shares = ("merged %", "slowest %") if spread else ()
    made = table(title, "method", "M", "in rounds %", *shares, "H", "tokens/h", "lost, % of the time")
    made.columns[-1].justify = "left"
    for cell in cells:
        steps = "" if cell.effective_h is None else f"{cell.effective_h:.0f}"
        merged = (_percent(cell.merged_share), _percent(cell.merged_share_slowest)) if spread else ()
        figures = (_percent(cell.participation), *merged, steps, short(cell.tokens_per_hour))
        made.add_row(NAMES[cell.method], str(cell.learners), *figures, losses(cell))
    return made


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"


def losses(cell: Cell) -> str:
    largest = sorted(cell.lost.items(), key=lambda item: -item[1])[:HEADLINE_LOSSES]
    return ", ".join(f"{reason} {100 * share:.1f}" for reason, share in largest if share >= 0.0005)


def _goodput(cell: Cell) -> str:
    half = _half(cell)
    return f"{100 * cell.goodput:.1f}" + (f" ±{100 * half:.1f}" if half is not None else "")


def heat(cells: Sequence[Cell], profile: Profile) -> plots.HeatMap:
    sizes = sorted({cell.chips for cell in cells})
    ways = list(dict.fromkeys((cell.method, cell.learners) for cell in cells))
    by = {(cell.method, cell.learners, cell.chips): cell for cell in cells}
    grid = [[by.get((*way, size)) for size in sizes] for way in ways]
    return plots.HeatMap(
        title="Goodput under failures",
        note=f"constants: {profile.provenance}",
        columns=tuple(short(size) for size in sizes),
        rows=tuple(_way(*way) for way in ways),
        values=tuple(tuple(None if cell is None else cell.goodput for cell in line) for line in grid),
        spreads=tuple(tuple(_half(cell) for cell in line) for line in grid),
        column_label="chips",
        row_label="learners",
    )


def lanes(job: Job, lives: Sequence[Sequence[TimeSpan]]) -> plots.LaneChart:
    """Every learner's life, with a mark where it lost slices."""
    many = f", the first {LANES} of {len(lives)} learners" if len(lives) > LANES else ""
    return plots.LaneChart(
        title=f"{_way(job.method, job.learners)} on {short(job.chips)} chips{many}",
        note=f"constants: {job.profile.provenance}",
        lanes=tuple(_lane(f"learner-{number}", life) for number, life in enumerate(lives[:LANES])),
    )


def _lane(name: str, life: Sequence[TimeSpan]) -> plots.Lane:
    stretches = tuple(plots.LaneSegment(one.start, one.end, one.kind, one.share) for one in life)
    down = ("scaling down", "outage", "gone")
    return plots.Lane(name, stretches, tuple(plots.LaneMark(one.start, one.kind) for one in life if one.kind in down))


def _way(method: str, learners: int) -> str:
    return f"{NAMES[method]}, M = {learners}"


def _half(cell: Cell | None) -> float | None:
    if cell is None or cell.goodput_interval is None:
        return None
    return (cell.goodput_interval[1] - cell.goodput_interval[0]) / 2


def short(value: float) -> str:
    """150000 as 150k, 1200000 as 1.2M."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def miss_table(misses: Sequence[Miss]) -> Table:
    made = table("the table, and what the simulator gives", "method", "M", "chips", "figure", "table", "here", "error")
    for miss in misses:
        known, here = f"{100 * miss.known:.0f}", f"{100 * miss.simulated:.1f}"
        size = short(miss.chips)
        made.add_row(NAMES[miss.method], str(miss.learners), size, miss.figure, known, here, f"{miss.error:+.1f}")
    return made


def prediction_table(measured: MeasuredRun, predicted: Cell) -> Table:
    profile = measured.profile
    made = table(profile.provenance, "", "measured", "predicted")
    made.add_row("learners", str(measured.learners))
    made.add_row("seconds", f"{measured.wall_s:.1f}")
    made.add_row("step", f"{1000 * profile.step_s:.1f} ms, {100 * (1 - profile.speed.idle):.1f} % of it work")
    times = ", ".join(f"{seconds:.1f}" for seconds in profile.failures.observed_s[:6])
    made.add_row("deaths", f"{measured.deaths}" + (f" ({times} s)" if times else ""))
    made.add_row("goodput %", f"{100 * measured.goodput:.1f}", _goodput(predicted))
    made.add_row("uptime %", f"{100 * measured.uptime:.1f}", f"{100 * predicted.uptime:.1f}")
    return made


# ---- a profile of a real run ----------------------------------------------------------------------------------------

NEVER_S = 100 * YEAR_S
"""Between two failures where there was none."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    learners: int
    wall_s: float
    deaths: int
    goodput: float
    uptime: float
    participation: float | None
    profile: Profile


def measure_run(events: Iterable[Event], name: str) -> MeasuredRun:
    timeline = remove_idle_time(sorted(events, key=lambda event: float(event["at"])))
    summary = summarise(timeline)
    part, settings = find_training_part(timeline), summary["settings"]
    lives = _lives(timeline, part)
    stepping_s = sum(span.length for spans in lives.values() for span in spans)
    work = work_done(timeline, int(settings.get("fragments") or 1)).values()
    steps, busy_s = sum(one.steps for one in work), sum(one.busy_s for one in work)
    if not steps or not stepping_s or summary["goodput"] is None:
        raise ConfigError(f"{name} holds no steps to learn from: name a run that has trained for a while")
    absences = [after.start - before.end for spans in lives.values() for before, after in pairwise(spans)]
    unfinished = [part.end - spans[-1].end for spans in lives.values() if spans[-1].end < part.end]
    deaths = len(absences) + len(unfinished)
    learners = max(int(settings.get("learners") or 0), len(lives))
    profile = Profile(
        provenance=f"measured in {name}",
        step_s=stepping_s / steps,
        slices=learners,
        failures=Failures(mtbi_s=stepping_s / deaths if deaths else NEVER_S, observed_s=tuple(absences or unfinished)),
        elasticity=Elasticity(
            down_s=0.0, up_s=0.0, recover_s=0.0, start_s=tuple(spans[0].start - part.start for spans in lives.values())
        ),
        speed=Speed(idle=max(0.0, 1.0 - busy_s / stepping_s)),
        rules=RoundRules(
            sync_every=int(settings["sync_every"]),
            fragments=int(settings["fragments"]),
            overlap=int(settings["overlap"]),
            quorum=int(settings["quorum"]),
            grace=settings["quorum_policy"] == "grace",
            latency_s=0.001,
        ),
    )
    return MeasuredRun(
        learners, part.length, deaths, summary["goodput"], summary["uptime"], summary["participation"], profile
    )


def _lives(timeline: list[Event], part: Span) -> dict[str, list[Span]]:
    """Per learner, when it was stepping: in order, within the training part."""
    found: dict[str, list[Span]] = {}
    for learner, span in find_stays(timeline, ("recovered",), part.end):
        inside = span.within(part)
        if inside.length > 0:
            found.setdefault(learner, []).append(inside)
    return {learner: sorted(spans) for learner, spans in found.items()}
