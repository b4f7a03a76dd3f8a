"""The pages of the project, for the tests that hold them against the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """Without fenced blocks."""
    return FENCE.sub("", text)


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a text, row by row, without its head."""
    _, found, rest = text.partition(heading)
    assert found, f"{heading!r} is not on the page"
    table = re.search(r"^\| --- .*\n((?:\|.*\n)*)", rest, re.MULTILINE)
    assert table is not None, f"no table behind {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
