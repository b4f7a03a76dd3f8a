"""Pictures as pages: plotly's traces as plain JSON, so that its large Python half is never imported.

A page holds its figures and the library that draws them, once. It follows the reader's light or dark scheme and prints
well. The policy in its head forbids it to load anything: it looks the same without a network, and contacts nobody.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from string import Template
from typing import Any

from atoll.observe.figures import clock, count, percent
from atoll.observe.plots.pictures import (
    KINDS,
    CurveChart,
    Drawable,
    HeatMap,
    Lane,
    LaneChart,
    LaneKind,
    LaneMark,
    LaneSegment,
    Picture,
    TimeChart,
    fitted,
    noted,
)
from atoll.observe.plots.style import (
    DARK,
    HEAT,
    KIND_COLOURS,
    LIGHT,
    ColourScheme,
    Unit,
    decimal_ticks,
    digits,
    heat_range,
    ink_on_heat,
    see_through,
    strokes,
    unit_of,
    x_range,
)

PlotlyPart = dict[str, Any]


SYMBOLS = ("triangle-down", "x", "diamond", "circle", "square", "star", "cross")
"""Of marks, by the order in which their names come."""
GOOD_SYMBOLS = ("triangle-up", "triangle-up-open")


def render(picture: Picture) -> bytes:
    return page(drawn(picture))


def drawn(picture: Drawable) -> DrawnFigure:
    match picture:
        case HeatMap():
            return DrawnFigure(picture.title, picture.note, *_heat(picture))
        case CurveChart():
            return DrawnFigure(picture.title, picture.note, *_curves(picture))
        case TimeChart():
            return DrawnFigure(picture.title, picture.note, *_course(picture))
        case LaneChart():
            shown, grain_s = fitted(picture)
            return DrawnFigure(picture.title, noted(picture.note, grain_s), *_lanes(shown))


def _heat(picture: HeatMap) -> tuple[list[PlotlyPart], PlotlyPart]:
    rows, columns = range(len(picture.rows)), range(len(picture.columns))
    values = [[picture.value(row, column) for column in columns] for row in rows]
    low, high = heat_range([value for row in values for value in row if value is not None])
    trace: PlotlyPart = {
        "type": "heatmap",
        "z": [[None if value is None else round(100 * value, 4) for value in row] for row in values],
        "customdata": [[_told(picture, row, column) for column in columns] for row in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "colorscale": [[index / (len(HEAT) - 1), colour] for index, colour in enumerate(HEAT)],
        "zmin": 100 * low,
        "zmax": 100 * high,
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"ticksuffix": " %", "dtick": 10 if high - low < 0.65 else 20, "thickness": 12, "outlinewidth": 0},
    }
    layout = _layout(height=46 * len(rows) + 90) | {
        "xaxis": _names(picture.column_label, picture.columns),
        "yaxis": _names(picture.row_label, picture.rows) | {"autorange": "reversed"},
        "annotations": [_cell(row, column, values[row][column], low, high) for row in rows for column in columns],
    }
    return [trace], layout


def _cell(row: int, column: int, value: float | None, low: float, high: float) -> PlotlyPart:
    font: PlotlyPart = {"size": 15} if value is None else {"size": 15, "color": ink_on_heat(value, low, high)}
    return {"x": column, "y": row, "text": percent(value), "font": font, "showarrow": False}


def _told(picture: HeatMap, row: int, column: int) -> str:
    value, spread = picture.value(row, column), picture.spread(row, column)
    figure = percent(None) if value is None else f"{100 * value:.2f} %"
    about = "" if value is None or spread is None else f" ± {100 * spread:.2f} %"
    return f"{escape(picture.rows[row])}<br>{escape(picture.columns[column])}<br><b>{figure}{about}</b>"


def _curves(picture: CurveChart) -> tuple[list[PlotlyPart], PlotlyPart]:
    low, high = x_range(picture.lines)
    ticks = decimal_ticks(low, high)
    figures = f"<br>{escape(picture.x_label)}: %{{x:.3~g}}<br>{escape(picture.y_label)}: <b>%{{y:.1f}} %</b>"
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(line.name),
            "x": [x for x, _ in line.points],
            "y": [round(100 * y, 4) if math.isfinite(y) else None for _, y in line.points],
            "line": {"color": stroke.colour, "dash": stroke.dash, "width": 2.5},
            "hovertemplate": f"{escape(line.name)}{figures}<extra></extra>",
        }
        for line, stroke in zip(picture.lines, strokes(picture.lines), strict=True)
    ]
    layout = _layout(height=max(520, 22 * len(traces) + 120)) | {
        "xaxis": _titled(picture.x_label)
        | {"type": "log", "range": [math.log10(low), math.log10(high)]}
        | {"tickvals": ticks, "ticktext": [digits(tick) for tick in ticks]},
        "yaxis": _titled(picture.y_label) | {"range": [0, 103], "ticksuffix": " %", "dtick": 10},
        "legend": {"x": 1.02, "y": 1, "font": {"size": 13}, "itemwidth": 45},
        "showlegend": True,
    }
    return traces, layout


def _course(picture: TimeChart) -> tuple[list[PlotlyPart], PlotlyPart]:
    unit = Unit(picture.x_label, 1.0) if picture.x_label else unit_of(picture.last_s)
    scale, suffix = (100.0, " %") if picture.shares else (1.0, "")
    figure = f"%{{y:.1f}}{suffix}" if picture.shares else "%{y:.4~g}"
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers" if trail.dots else "lines",
            "name": escape(trail.name),
            "x": [round(at_s / unit.seconds, 6) for at_s, _ in trail.points],
            "y": [round(scale * value, 6) if math.isfinite(value) else None for _, value in trail.points],
            "text": [count(at) if picture.x_label else clock(at) for at, _ in trail.points],
            "line": {
                "color": stroke.colour,
                "dash": stroke.dash,
                "width": 2,
                "shape": "hv" if trail.steps else "linear",
            },
            "marker": {"size": 6, "color": stroke.colour},
            "cliponaxis": not trail.dots,
            "hovertemplate": f"{escape(trail.name)}<br>%{{text}}: <b>{figure}</b><extra></extra>",
        }
        for trail, stroke in zip(picture.trails, strokes(picture.trails), strict=True)
    ]
    up: PlotlyPart = {"range": [0, 103], "ticksuffix": " %", "dtick": 20} if picture.shares else {"nticks": 8}
    layout = _layout(height=340) | {
        "xaxis": _titled(picture.x_label) | {"nticks": 14} if picture.x_label else _time(picture.last_s),
        "yaxis": _titled(picture.y_label) | up,
        "margin": {"l": 10, "r": 10, "t": 48, "b": 10},
        "legend": _above(height=340 - 110),
        "showlegend": True,
    }
    return traces, layout


def _lanes(picture: LaneChart) -> tuple[list[PlotlyPart], PlotlyPart]:
    lane_px = 34 if len(picture.lanes) <= 16 else 15
    traces = [trace for kind in KINDS for full in (True, False) if (trace := _stretches(picture, kind, full))]
    height = lane_px * max(1, len(picture.lanes)) + 150
    layout = _layout(height) | {
        "xaxis": _time(picture.end_s),
        "yaxis": _names("", tuple(lane.name for lane in picture.lanes))
        | {"range": [len(picture.lanes) - 0.5, -0.5], "tickfont": {"size": 13 if lane_px > 20 else 11}},
        "margin": {"l": 10, "r": 10, "t": 62, "b": 10},  # the legend stands under the buttons
        "barmode": "overlay",
        "bargap": 0.25,
        "legend": _above(height - 150),
        "showlegend": True,
    }
    return [*traces, *_marks(picture, lane_px)], layout


def _stretches(picture: LaneChart, kind: LaneKind, full: bool) -> PlotlyPart | None:
    """All of one kind in one trace; stepping has a second one for those in which slices are missing."""
    unit = unit_of(picture.end_s)
    found = [
        (index, lane, stretch)
        for index, lane in enumerate(picture.lanes)
        for stretch in lane.stretches
        if stretch.kind == kind and full == (stretch.share >= 1.0 or kind != "stepping")
    ]
    if not found:
        return None
    if not full:
        found.sort(key=lambda one: one[2].share)  # the legend shows the first one: let it be the lightest
    colours = [see_through(KIND_COLOURS[kind], stretch.share) for _, _, stretch in found]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind if full else f"{kind}, slices missing",
        "y": [index for index, _, _ in found],
        "base": [round(stretch.start_s / unit.seconds, 6) for _, _, stretch in found],
        "x": [round((stretch.end_s - stretch.start_s) / unit.seconds, 6) for _, _, stretch in found],
        "text": [_when(lane, stretch) for _, lane, stretch in found],
        "textposition": "none",
        "hovertemplate": f"%{{text}}<br>{kind}<extra></extra>",
        "marker": {"color": KIND_COLOURS[kind] if full else colours, "line": {"width": 0}},
    }


def _when(lane: Lane, stretch: LaneSegment) -> str:
    slices = f"<br>{percent(stretch.share)} of its slices" if stretch.share < 1.0 else ""
    return f"{escape(lane.name)}, {clock(stretch.start_s)} – {clock(stretch.end_s)}{slices}"


def _marks(picture: LaneChart, lane_px: int) -> list[PlotlyPart]:
    """A trace for every name, in the order in which they first come."""
    found = [(index, lane, mark) for index, lane in enumerate(picture.lanes) for mark in lane.marks]
    kinds = dict.fromkeys((mark.name, mark.good) for _, _, mark in sorted(found, key=lambda one: one[2].at_s))
    left = {False: cycle(SYMBOLS), True: cycle(GOOD_SYMBOLS)}
    return [
        _marked(
            picture, [one for one in found if (one[2].name, one[2].good) == (name, good)], next(left[good]), lane_px
        )
        for name, good in kinds
    ]


def _marked(picture: LaneChart, found: list[tuple[int, Lane, LaneMark]], symbol: str, lane_px: int) -> PlotlyPart:
    unit = unit_of(picture.end_s)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(found[0][2].name),
        "x": [round(mark.at_s / unit.seconds, 6) for _, _, mark in found],
        "y": [index + (0.38 if mark.good else -0.38) for index, _, mark in found],
        "text": [f"{escape(lane.name)}, {clock(mark.at_s)}<br>{escape(mark.text)}" for _, lane, mark in found],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": symbol, "size": 9 if lane_px > 20 else 6, "opacity": 1},
        "cliponaxis": False,
    }


def _layout(height: int) -> PlotlyPart:
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 10, "r": 10, "t": 30, "b": 10},
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
    }


def _above(height: int) -> PlotlyPart:
    """A legend in a row over a plot of this height."""
    return {"orientation": "h", "x": 0, "y": 1 + 8 / height, "yanchor": "bottom", "traceorder": "normal"}


def _time(end_s: float) -> PlotlyPart:
    unit = unit_of(end_s)
    return _titled(f"time in {unit.name}") | {"range": [0, end_s / unit.seconds or 1.0], "nticks": 14}


def _titled(label: str) -> PlotlyPart:
    """An axis with its label and a little air between its ticks and the data."""
    air = {"ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"}
    return {"title": {"text": escape(label), "standoff": 12}, "automargin": True} | air


def _names(label: str, names: tuple[str, ...]) -> PlotlyPart:
    """An axis of names that does not zoom: two of the same name are still two."""
    ticks = {"tickvals": list(range(len(names))), "ticktext": [escape(name) for name in names]}
    return _titled(label) | ticks | {"fixedrange": True, "showgrid": False, "zeroline": False}


# ---- the page -------------------------------------------------------------------------------------------------------

_FRAME = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'">
<title>$title</title>
<style>
:root { color-scheme: light dark; $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
@media print { :root { color-scheme: light; $light } .figure { min-width: 0 } .scroll { overflow: visible } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 24px }
h1 { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.25 }
p { margin: 4px 0 12px; color: var(--faint) }
.scroll { overflow-x: auto }
.figure { min-width: 840px }
$style</style>
</head>
<body>
<main>
$body
</main>
$scripts</body>
</html>
""")

_SCRIPT = Template("""\
<script>
{
const data = $data;
const layouts = $layouts;
const dark = matchMedia("(prefers-color-scheme: dark)");
const layout = () => layouts[dark.matches ? "dark" : "light"];
const settings = {displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtons: [$buttons]};
const draw = (shown) => Plotly.react("$name", data, shown, settings);
draw(layout());
dark.addEventListener("change", () => draw(layout()));
addEventListener("beforeprint", () => draw({...layouts.light, width: $paper_px, autosize: false}));
addEventListener("afterprint", () => draw(layout()));
}
</script>
""")

_BUTTONS = ["toImage", "zoom2d", "pan2d", "resetScale2d"]
"""Named one by one: plotly's own choice has one that sends the figure to its makers."""
PAPER_PX = 700
"""How wide a figure is when it is printed: A4 and Letter, upright."""
NO_SCRIPT = (
    "<noscript><p>Figures are drawn by a script within this file; the browser was told to run none.</p></noscript>"
)


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A picture as plotly understands it."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def page(drawn: DrawnFigure) -> bytes:
    """One picture."""
    body = f"<h1>{escape(drawn.title)}</h1>\n<p>{escape(drawn.note)}</p>\n{place(drawn, 'figure')}\n{NO_SCRIPT}"
    return frame(drawn.title, "", body, [(drawn, "figure")])


def place(drawn: DrawnFigure, name: str) -> str:
    """Where a figure of this name will be."""
    height = drawn.layout["height"]
    return f'<div class="scroll"><div id="{name}" class="figure" style="min-height: {height}px"></div></div>'


def frame(title: str, style: str, body: str, figures: Sequence[tuple[DrawnFigure, str]]) -> bytes:
    """A page around `body`, which is HTML already and has a place for each of the figures by their names."""
    from plotly.offline import get_plotlyjs

    library = f"<script>{get_plotlyjs()}</script>\n" if figures else ""
    text = _FRAME.substitute(
        title=escape(title),
        style=style,
        body=body,
        light=_colours(LIGHT),
        dark=_colours(DARK),
        scripts=library + "".join(_figure(drawn, name) for drawn, name in figures),
    )
    return text.encode()


def _figure(drawn: DrawnFigure, name: str) -> str:
    return _SCRIPT.substitute(
        name=name,
        paper_px=PAPER_PX,
        data=_script(drawn.data),
        layouts=_script({"light": _dressed(drawn.layout, LIGHT), "dark": _dressed(drawn.layout, DARK)}),
        buttons=_script(_BUTTONS[:1] if drawn.layout["xaxis"].get("fixedrange") else _BUTTONS),
    )


def _colours(ground: ColourScheme) -> str:
    return f"--paper: {ground.paper}; --ink: {ground.ink}; --faint: {ground.faint_ink}; --line: {ground.grid}"


def _dressed(layout: dict[str, Any], ground: ColourScheme) -> dict[str, Any]:
    """The layout in the colours of a scheme."""
    lines = {"gridcolor": ground.grid, "zerolinecolor": ground.grid}
    label = {"bgcolor": ground.paper, "font": {"color": ground.ink}}
    return layout | {
        "paper_bgcolor": ground.paper,
        "plot_bgcolor": ground.paper,
        "colorway": [ground.ink],  # a trace that names no colour is drawn in ink
        "font": layout["font"] | {"color": ground.ink},
        "hoverlabel": layout["hoverlabel"] | label,
        "xaxis": layout["xaxis"] | lines,
        "yaxis": layout["yaxis"] | lines,
    }


def _script(value: Any) -> str:
    """JSON that may stand in a script: no text in it can end the script."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
