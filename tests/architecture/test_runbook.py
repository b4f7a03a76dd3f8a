"""docs/runbook.md: each bad hour says the same five things, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n\n((?:- .*\n)+)", PAGE, re.MULTILINE))
HOURS = (
    "Syncer host lost",
    "Syncer host cut off",
    "Disk lost",
    "Part of the journal lost",
    "Bucket lost",
    "Link cut",
    "Region lost",
    "Wrong data",
    "Poisoned model",
    "A learner that lies",
    "Keys leaked",
)


def test_every_bad_hour_has_its_section() -> None:
    assert tuple(SECTIONS) == HOURS


@pytest.mark.parametrize("hour", HOURS)
def test_each_says_what_happens_and_names_tests_that_exist(hour: str) -> None:
    words = re.findall(r"^- \*\*(.+?):\*\*", SECTIONS[hour], re.MULTILINE)
    assert words == ["By itself", "Type", "Costs", "Screen and status", "Test"]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECTIONS[hour].rpartition("**Test:**")[2])
    assert named
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
