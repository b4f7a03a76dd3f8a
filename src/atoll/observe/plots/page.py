"""A page that holds a figure and the library that draws it, in the reader's light or dark scheme.

The policy in its head forbids it to load anything from anywhere: it looks the same without a network, and tells nobody.
"""

from __future__ import annotations

import json
from html import escape
from string import Template
from typing import Any

from atoll.observe.plots.palette import DARK, LIGHT, Ground

_PAGE = Template("""\
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
:root { color-scheme: light dark; --paper: $light_paper; --ink: $light_ink; --faint: $light_faint }
@media (prefers-color-scheme: dark) { :root { --paper: $dark_paper; --ink: $dark_ink; --faint: $dark_faint } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 24px; overflow-x: auto }
h1 { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.25 }
p { margin: 4px 0 12px; color: var(--faint) }
#figure { min-width: 840px; min-height: ${height}px }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p>$note</p>
<div id="figure"></div>
<noscript><p>The figure is drawn by a script within this file; the browser was told to run none.</p></noscript>
</main>
<script>$library</script>
<script>
const data = $data;
const layouts = $layouts;
const dark = matchMedia("(prefers-color-scheme: dark)");
const layout = () => layouts[dark.matches ? "dark" : "light"];
const settings = {displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtons: [$buttons]};
Plotly.newPlot("figure", data, layout(), settings);
dark.addEventListener("change", () => Plotly.react("figure", data, layout()));
</script>
</body>
</html>
""")

_BUTTONS = ["toImage", "zoom2d", "pan2d", "resetScale2d"]
"""Named one by one: plotly's own choice has one that sends the figure to its makers."""


def page(title: str, note: str, data: list[dict[str, Any]], layout: dict[str, Any]) -> bytes:
    from plotly.offline import get_plotlyjs

    text = _PAGE.substitute(
        title=escape(title),
        note=escape(note),
        height=layout["height"],
        library=get_plotlyjs(),
        buttons=_script(_BUTTONS[:1] if layout["xaxis"].get("fixedrange") else _BUTTONS),
        data=_script(data),
        layouts=_script({"light": _dressed(layout, LIGHT), "dark": _dressed(layout, DARK)}),
        **{f"light_{name}": colour for name, colour in _colours(LIGHT).items()},
        **{f"dark_{name}": colour for name, colour in _colours(DARK).items()},
    )
    return text.encode()


def _colours(ground: Ground) -> dict[str, str]:
    return {"paper": ground.paper, "ink": ground.ink, "faint": ground.faint_ink}


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
