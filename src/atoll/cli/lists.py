"""What calculators read and print: lists and numbers as people write them (`1,5`, `150k,1.2M`, `7B`), rows as CSV.

k, M and B stand for thousand, million and billion. Only what is no number, or not a finite one, is refused here:
whoever uses the numbers knows what signs and sizes make sense.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from atoll.protocol.errors import ConfigError

Listed = TypeVar("Listed", bound=str)

ZEROS = {"k": 3, "K": 3, "m": 6, "M": 6, "b": 9, "B": 9}


def numbers(option: str, text: str) -> list[float]:
    """`0.5,2k` is [0.5, 2000.0]."""
    return [float(_exact(option, text, word)) for word in words(option, text)]


def counts(option: str, text: str) -> list[int]:
    """`8,150k,1.2M` is [8, 150000, 1200000]; 1.5 is no count."""
    return [_whole(option, text, _exact(option, text, word)) for word in words(option, text)]


def number(option: str, text: str) -> float:
    """One number, where a list makes no sense."""
    return float(_exact(option, text, text.strip()))


def count(option: str, text: str) -> int:
    """One whole number, where a list makes no sense."""
    return _whole(option, text, _exact(option, text, text.strip()))


def names(option: str, text: str, known: Sequence[Listed]) -> list[Listed]:
    """Words out of those known: `bf16,int4`."""
    found: dict[str, Listed] = {name: name for name in known}
    for word in words(option, text):
        if word not in found:
            raise ConfigError(f"{option} {text!r}: there is no {word!r}; take {', '.join(known)}")
    return [found[word] for word in words(option, text)]


def words(option: str, text: str) -> list[str]:
    """What stands between the commas."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {text!r}: a value is missing; write a list as in 1,5")
    return found


def _exact(option: str, text: str, word: str) -> Decimal:
    """In tens, so that 1.2M is a whole number."""
    zeros = ZEROS.get(word[-1:], 0)
    try:
        value = Decimal(word[:-1] if zeros else word).scaleb(zeros)
        if math.isfinite(float(value)):
            return value
    except (ArithmeticError, ValueError):
        pass
    raise ConfigError(f"{option} {text!r}: {word!r} is no number; write 5, 0.5, 1e6, 150k, 1.2M or 7B")


def _whole(option: str, text: str, value: Decimal) -> int:
    if value != value.to_integral_value():
        raise ConfigError(f"{option} {text!r}: {float(value):g} is no whole number")
    return int(value)


# ---- what they print ------------------------------------------------------------------------------------------------


def one_form(json_: bool, csv_: bool) -> None:
    if json_ and csv_:
        raise ConfigError("--json and --csv exclude each other: take one of them")


def print_json(document: object) -> None:
    print(msgspec.json.encode(document).decode())


def print_csv(rows: Sequence[msgspec.Struct | dict[str, Any]]) -> None:
    """A header and a line for each row; a cell is empty where a row has no such figure."""
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
