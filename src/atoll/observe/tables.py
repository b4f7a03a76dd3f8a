"""The look of a table in the terminal: no boxes, a line under the head, figures to the right."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(title: str, *columns: str, words: int = 1) -> Table:
    """The first so many columns hold words, the others figures."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < words else "right", no_wrap=place < words)
    return made
