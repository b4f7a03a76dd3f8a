"""Numbers, short texts and tables as people read them: the same on every screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from atoll.protocol.statistics import UNKNOWN

NONE = UNKNOWN
"""Shown where there is no figure yet."""

CAUSES = {
    "overlap": "by overlap",
    "missed": "in missed rounds",
    "untold": "by overlap or in missed rounds (told apart when their learners leave)",
    "crash": "lost",
    "cut": "not merged at the cut that the run began from",
    "filtered": "by the outlier filter",
}
"""Why tokens are in no version."""

_BARS = "▁▂▃▄▅▆▇█"


def count(value: float) -> str:
    """6,204 in full; 12.7M and 84.1k once that is enough to know."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.1f}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    if share is None:
        return NONE
    text = f"{100 * share:.0f}"
    # 99.7 % is not all of it, nor is 99.99 %; and 0.3 % is something.
    if (text == "100" and share < 1.0) or (text == "0" and share > 0.0):
        text = f"{min(max(100 * share, 0.1), 99.9):.1f}"
    return f"{text} %"


def causes_of(dropped_by_cause: dict[str, int], computed: int) -> list[str]:
    """6 % by overlap, 2 % in missed rounds, 0 % lost (with a process, or in quarantine)."""
    return [
        f"{percent(dropped_by_cause.get(cause, 0) / max(1, computed))} {words}"
        for cause, words in CAUSES.items()
        if cause in dropped_by_cause
        or cause not in ("filtered", "untold", "cut")  # with --robust; of a journal (atoll verify); --from-cut
    ]


def clock(seconds: float | None) -> str:
    """0:41, 12:05, 1:02:33."""
    if seconds is None:
        return NONE
    whole = max(0, round(seconds))
    minutes, hours = whole // 60, whole // 3600
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def span(seconds: float | None) -> str:
    """31 ms, 6.1 s, 1 min 44 s, 2 h 5 min."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def decimal(value: float | None, places: int = 2) -> str:
    return NONE if value is None else f"{value:.{places}f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a figure in a few characters, the newest at the right."""
    if len(values) < 2 or width < 2:
        return ""
    points = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / (points - 1))] for i in range(points)]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in picked)


def listing(names: Sequence[str], most: int = 4) -> str:
    """a, b and c; a, b, c and 5 more."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def plain(text: str, keep: str = "") -> str:
    """Text from elsewhere, safe on a terminal: no escape sequences, no control characters but those in `keep`."""
    return "".join(letter if letter.isprintable() or letter in keep else "·" for letter in text)


def table(title: str, *columns: str, words: int = 1) -> Table:
    """A table without boxes; the first `words` columns are left-aligned, the others hold figures."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < words else "right", no_wrap=place < words)
    return made
