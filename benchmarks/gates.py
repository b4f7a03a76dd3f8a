"""Figures that may not creep up: a new result beside the committed one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT = 0.03
"""Share by which a figure may exceed the committed one."""


def judge(result: Mapping[str, Any], committed: Path, figures: Mapping[str, Any], *same: str) -> int:
    """Print each figure beside the committed one and return the exit code: 1 if one is too far above it.

    `figures` names them as the committed result does, one level down. Results are comparable only where all that `same`
    names is equal in both.
    """
    before = json.loads(committed.read_text()) if committed.exists() else {}
    for what in same:
        if result[what] != before.get(what):
            print(f"not comparable: {what} is {result[what]} here, {before.get(what)} in {committed.name}")
            return 0
    code = 0
    for group, values in figures.items():
        for name, value in values.items():
            known = before[group][name]
            code |= value > (1 + LIMIT) * known
            print(f"{group} {name}: {value:,}, committed {known:,} ({100 * (value / known - 1):+.2f} %)")
    if code:
        print(
            f"more than {100 * LIMIT:g} % above {committed.name}: make it cheaper, or say in a note why it costs more"
        )
    return code
