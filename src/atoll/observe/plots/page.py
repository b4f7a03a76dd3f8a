"""A page that holds figures and the library that draws them, in the reader's light or dark scheme, and on paper.

The policy in its head forbids it to load anything from anywhere: it looks the same without a network, and tells nobody.
However many figures there are, the library is in it once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any

from atoll.observe.plots.palette import DARK, LIGHT, Ground

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
class Drawn:
    """A picture as plotly understands it."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def page(drawn: Drawn) -> bytes:
    """One picture."""
    body = f"<h1>{escape(drawn.title)}</h1>\n<p>{escape(drawn.note)}</p>\n{place(drawn, 'figure')}\n{NO_SCRIPT}"
    return frame(drawn.title, "", body, [(drawn, "figure")])


def place(drawn: Drawn, name: str) -> str:
    """Where a figure of this name will be."""
    height = drawn.layout["height"]
    return f'<div class="scroll"><div id="{name}" class="figure" style="min-height: {height}px"></div></div>'


def frame(title: str, style: str, body: str, figures: Sequence[tuple[Drawn, str]]) -> bytes:
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


def _figure(drawn: Drawn, name: str) -> str:
    return _SCRIPT.substitute(
        name=name,
        paper_px=PAPER_PX,
        data=_script(drawn.data),
        layouts=_script({"light": _dressed(drawn.layout, LIGHT), "dark": _dressed(drawn.layout, DARK)}),
        buttons=_script(_BUTTONS[:1] if drawn.layout["xaxis"].get("fixedrange") else _BUTTONS),
    )


def _colours(ground: Ground) -> str:
    return f"--paper: {ground.paper}; --ink: {ground.ink}; --faint: {ground.faint_ink}; --line: {ground.grid}"


def _dressed(layout: dict[str, Any], ground: Ground) -> dict[str, Any]:
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
