"""Pictures as images: matplotlib without its global state, always on white."""

from __future__ import annotations

import textwrap
from io import BytesIO
from typing import TYPE_CHECKING, Any

from atoll.observe.figures import percent
from atoll.observe.plots.pictures import (
    KINDS,
    MOST_IN_IMAGE,
    CurveChart,
    HeatMap,
    LaneChart,
    LaneKind,
    Picture,
    fitted,
    noted,
)
from atoll.observe.plots.style import (
    HEAT,
    KIND_COLOURS,
    LIGHT,
    decimal_ticks,
    digits,
    heat_range,
    ink_on_heat,
    step_of,
    strength,
    strokes,
    unit_of,
    x_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

DOTS_PER_INCH = 160
WIDTH_IN = 10.0

_DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (5, 2, 1, 2)),
    "longdash": (0, (10, 3)),
}

_LOOK: Any = {  # its keys are known to newer stubs one by one, to older ones as text
    "text.parse_math": False,  # a $ in a name is a $
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.ink,
    "axes.edgecolor": LIGHT.grid,
    "xtick.color": LIGHT.grid,
    "ytick.color": LIGHT.grid,
    "xtick.labelcolor": LIGHT.ink,
    "ytick.labelcolor": LIGHT.ink,
    "grid.color": LIGHT.grid,
    "legend.frameon": False,
}


def render(picture: Picture) -> bytes:
    import matplotlib

    with matplotlib.rc_context(_LOOK):
        drawn = BytesIO()
        _figure(picture).savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    return drawn.getvalue()


def _figure(picture: Picture) -> Figure:
    match picture:
        case HeatMap():
            return _heat(picture)
        case CurveChart():
            return _curves(picture)
        case LaneChart():
            return _lanes(*fitted(picture, MOST_IN_IMAGE))


def _sheet(title: str, note: str, body_in: float) -> tuple[Figure, Axes]:
    """An empty figure with its words at the top, and the axes under them."""
    from matplotlib.figure import Figure

    heads, notes = textwrap.wrap(title, 80), textwrap.wrap(note, 125)
    head_in = 0.15 + 0.26 * len(heads) + 0.18 * len(notes)
    height_in = head_in + body_in
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=LIGHT.paper)
    figure.set_layout_engine("constrained", rect=(0.005, 0, 0.99, 1 - head_in / height_in))
    figure.text(0.012, 1 - 0.1 / height_in, "\n".join(heads), size=14, weight="bold", va="top")
    notes_at = 1 - (0.13 + 0.26 * len(heads)) / height_in
    figure.text(0.012, notes_at, "\n".join(notes), size=9, color=LIGHT.faint_ink, va="top")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _heat(picture: HeatMap) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap

    figure, axes = _sheet(picture.title, picture.note, 0.42 * len(picture.rows) + 0.8)
    cells = [(row, column) for row in range(len(picture.rows)) for column in range(len(picture.columns))]
    values = [
        [picture.value(row, column) for column in range(len(picture.columns))] for row in range(len(picture.rows))
    ]
    low, high = heat_range([value for row in values for value in row if value is not None])
    scale = LinearSegmentedColormap.from_list("sand to sea", HEAT)
    numbers = [[float("nan") if value is None else value for value in row] for row in values]
    mesh = axes.pcolormesh(numbers, cmap=scale, vmin=low, vmax=high, edgecolor=LIGHT.paper, linewidth=1.5)
    for row, column in cells:
        value = values[row][column]
        colour = LIGHT.ink if value is None else ink_on_heat(value, low, high)
        axes.text(column + 0.5, row + 0.5, percent(value), color=colour, size=11, ha="center", va="center")
    axes.set_xticks([column + 0.5 for column in range(len(picture.columns))], picture.columns)
    axes.set_yticks([row + 0.5 for row in range(len(picture.rows))], picture.rows)
    axes.set(xlabel=picture.column_label, ylabel=picture.row_label)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=28, format=lambda value, _: f"{100 * value:.0f} %")
    bar.outline.set_visible(False)
    return figure


def _curves(picture: CurveChart) -> Figure:
    figure, axes = _sheet(picture.title, picture.note, max(4.4, 0.2 * len(picture.lines) + 0.6))
    for line, stroke in zip(picture.lines, strokes(picture.lines), strict=True):
        xs, ys = [x for x, _ in line.points], [100 * y for _, y in line.points]
        axes.plot(xs, ys, label=line.name, color=stroke.colour, linestyle=_DASHES[stroke.dash], linewidth=2)
    low, high = x_range(picture.lines)
    ticks = decimal_ticks(low, high)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [digits(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(0, 101, 10), [f"{value} %" for value in range(0, 101, 10)])
    axes.set(xlim=(low, high), ylim=(0, 103), xlabel=picture.x_label, ylabel=picture.y_label)
    axes.grid()
    if picture.lines:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), handlelength=3.6, fontsize=9, labelspacing=0.6)
    return figure


def _lanes(picture: LaneChart, grain_s: float) -> Figure:
    unit, roomy = unit_of(picture.end_s), len(picture.lanes) <= 16
    body_in = (0.32 if roomy else 0.15) * len(picture.lanes) + 1.2
    figure, axes = _sheet(picture.title, noted(picture.note, grain_s), body_in)
    drawn = [_stretches(axes, picture, kind, full) for kind in KINDS for full in (True, False)]
    marks = [
        (mark.at_s / unit.seconds, index - 0.38) for index, lane in enumerate(picture.lanes) for mark in lane.marks
    ]
    if marks:
        xs, ys = [x for x, _ in marks], [y for _, y in marks]
        size = 26 if roomy else 14
        axes.scatter(
            xs, ys, size, LIGHT.ink, marker="v", label="failure", zorder=3, edgecolors=LIGHT.paper, linewidths=0.5
        )
    axes.set_yticks(range(len(picture.lanes)), [lane.name for lane in picture.lanes], fontsize=10 if roomy else 7)
    axes.set(xlim=(0, picture.end_s / unit.seconds or 1.0), ylim=(len(picture.lanes) - 0.5, -0.7))
    axes.xaxis.set_major_locator(_every(step_of(picture.end_s)))
    axes.set_xlabel(f"time in {unit.name}")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if marks or any(drawn):
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, fontsize=9, handlelength=1.2)
    return figure


def _stretches(axes: Axes, picture: LaneChart, kind: LaneKind, full: bool) -> bool:
    """All of one kind at once; stepping has a second turn for those in which slices are missing."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    scale_s = unit_of(picture.end_s).seconds
    found = [
        (index, stretch)
        for index, lane in enumerate(picture.lanes)
        for stretch in lane.stretches
        if stretch.kind == kind and full == (stretch.share >= 1.0 or kind != "stepping")
    ]
    if not full:
        found.sort(key=lambda one: one[1].share)  # the legend shows the first one: let it be the lightest
    boxes = [_box(stretch.start_s / scale_s, stretch.end_s / scale_s, index) for index, stretch in found]
    colours = [to_rgba(KIND_COLOURS[kind], strength(stretch.share) if not full else 1.0) for _, stretch in found]
    if found:
        label = kind if full else f"{kind}, slices missing"
        axes.add_collection(PolyCollection(boxes, facecolors=colours, linewidths=0, label=label))
    return bool(found)


def _box(left: float, right: float, lane: int) -> list[tuple[float, float]]:
    top, bottom = lane - 0.375, lane + 0.375
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _every(step: float) -> Locator:
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(step)
