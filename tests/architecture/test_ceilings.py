"""The package and its tests stay below a ceiling of lines, so that nothing grows unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = {"src": 93_900, "tests": 92_600}
"""Lines of Python that each folder may have, as `wc -l` counts them."""
ROOM = 1500
"""Lines that a ceiling may lie above the real count: it follows downwards too."""


@pytest.mark.parametrize("folder", CEILINGS)
def test_a_ceiling_is_raised_only_by_what_a_note_lists(folder: str) -> None:
    lines = sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py"))
    ceiling = CEILINGS[folder]
    how = f"{folder}/ has {lines} lines of Python, and its ceiling (CEILINGS in {Path(__file__).name}) is {ceiling}"
    assert lines <= ceiling, (
        f"{how}: a landing that adds something new raises the ceiling by what its note lists; "
        "a landing that replaces something lowers it"
    )
    assert ceiling <= lines + ROOM, f"{how}: lower it, so that the lines that were removed stay away"
