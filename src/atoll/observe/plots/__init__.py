"""Pictures of what a simulation found: a heat map, curves or a timeline, as FILE.html or FILE.png.

A page needs nothing but itself: the library that draws it is inside, and its policy forbids it to load anything. plotly
and matplotlib are imported when a picture is drawn and not before: a command that draws none starts without them.
"""

from __future__ import annotations

import os
from pathlib import Path

from atoll.extras import check_installed
from atoll.observe.plots.pictures import (
    Curve,
    CurveChart,
    HeatMap,
    Lane,
    LaneChart,
    LaneMark,
    LaneSegment,
    Picture,
    TimeChart,
    TimeSeries,
)
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic

__all__ = [
    "Curve",
    "CurveChart",
    "HeatMap",
    "Lane",
    "LaneChart",
    "LaneMark",
    "LaneSegment",
    "Picture",
    "TimeChart",
    "TimeSeries",
    "check_plot_path",
    "write_picture",
]


def check_plot_path(path: Path) -> None:
    """Raise ConfigError now where `write_picture` could not write later: worth a call before a long simulation."""
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--plot {path}: write FILE.html or FILE.png")
    check_installed("plotly" if path.suffix == ".html" else "matplotlib", f"--plot {path}")
    if os.path.isdir(path):  # a name may be too long to ask pathlib
        raise ConfigError(f"--plot {path}: this is a folder; name a file in it")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--plot {path}: the folder {path.parent} may not be written to; name another one")


def write_picture(picture: Picture, path: Path) -> None:
    check_plot_path(path)
    data = _page(picture) if path.suffix == ".html" else _image(picture)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise ConfigError(f"--plot {path}: the file cannot be written ({error.strerror})") from error


def _page(picture: Picture) -> bytes:
    from atoll.observe.plots import html

    return html.render(picture)


def _image(picture: Picture) -> bytes:
    from atoll.observe.plots import png

    return png.render(picture)
