"""What calculators print: rows as CSV, and figures as short as they may be."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.protocol.errors import ConfigError


def one_form(json_: bool, csv_: bool) -> None:
    if json_ and csv_:
        raise ConfigError("--json and --csv exclude each other: take one of them")


def print_json(document: object) -> None:
    print(msgspec.json.encode(document).decode())


def print_csv(rows: Sequence[msgspec.Struct | dict[str, Any]]) -> None:
    """A header and a line for each row; nothing stands where a row has no such figure."""
    lines = [row if isinstance(row, dict) else msgspec.structs.asdict(row) for row in rows]
    table = csv.DictWriter(
        sys.stdout, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n"
    )
    table.writeheader()
    table.writerows(lines)


def significant(value: float) -> str:
    """Two significant digits, or more where they are whole: 0.58, 1.2, 49, 132."""
    if not value:
        return "0"
    decimals = max(0, 1 - math.floor(math.log10(abs(float(f"{value:.1e}")))))
    return f"{value:.{decimals}f}"
