"""The answers of the bandwidth calculator for a person: a table, curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from atoll.cli.rows import significant
from atoll.estimate.bandwidth import LEAST, MOST, BandwidthAnswer, BandwidthCase
from atoll.observe.figures import table

Cell = Callable[[BandwidthAnswer], str]
POINTS = 160
"""Of a curve."""


def print_table(answers: Sequence[BandwidthAnswer], by: Literal["utilization", "gbit_s"]) -> None:
    """A row for each case and a column for each of what was asked for."""
    console = Console(highlight=False)
    if by == "utilization":
        console.print(_table("Gbit/s that a utilization takes", answers, _percent, _width))
        return
    console.print(_table("Utilization that a bandwidth gives", answers, _link, _percent))
    decoupled = [one for one in answers if one.method == "decoupled"]
    if decoupled:
        title = "Freshness instead of waiting: effective H, steps late"
        console.print(_table(title, decoupled, _link, _freshness))


def _table(title: str, answers: Sequence[BandwidthAnswer], head: Cell, cell: Cell) -> Table:
    rows = [list(row) for _, row in groupby(answers, _case)]
    found = table(title, "method", "codec", "step", "n", *map(head, rows[0]), words=2)
    for row in rows:
        found.add_row(*_case(row[0]), *map(cell, row))
    return found


def _case(one: BandwidthAnswer) -> tuple[str, str, str, str]:
    codec = one.codec if one.down in (None, one.codec) else f"{one.codec} up, {one.down} down"
    return one.method, codec, f"{one.step_s:g} s", str(one.datacenters)


def _percent(one: BandwidthAnswer) -> str:
    return f"{100 * one.utilization:.3g} %"


def _width(one: BandwidthAnswer) -> str:
    return significant(one.gbit_s)


def _link(one: BandwidthAnswer) -> str:
    return f"{one.gbit_s:g} Gbit/s"


def _freshness(one: BandwidthAnswer) -> str:
    assert one.effective_h is not None and one.late_steps is not None
    return f"{one.effective_h:.3g}, {significant(one.late_steps)}"


def check_plot(path: Path) -> None:
    from atoll.observe import plots

    plots.check_plot_path(path)


def draw(path: Path, asked: Sequence[BandwidthCase], answers: Sequence[BandwidthAnswer], provenance: str) -> None:
    """Utilization over bandwidth, a decade beyond the answers."""
    from atoll.observe import plots

    widths = [one.gbit_s for one in answers if one.gbit_s > 0] or [1.0]
    low, high = max(LEAST, min(widths) / 10), min(MOST / 10, max(widths) * 10)
    grid = [low * (high / low) ** (point / (POINTS - 1)) for point in range(POINTS)]
    picture = plots.CurveChart(
        title="Compute utilization over the bandwidth between data centers",
        note=provenance,
        lines=tuple(
            plots.Curve(
                name=f"{case.method} {case.codec}, {case.run.step_s:g} s, {case.run.datacenters} data centers",
                points=tuple((width, case.at(width).utilization) for width in grid),
                family=f"{case.method} {case.codec}",
            )
            for case in asked
        ),
        x_label="bandwidth in Gbit/s",
        y_label="compute utilization",
    )
    plots.write_picture(picture, path)
    Console(stderr=True, highlight=False).print(f"drawn: {path}", soft_wrap=True, markup=False)
