"""Lists and numbers as people write them on a command line: `1,5`, `150k,1.2M`, `5e9`, `7B`.

k, M and B stand for thousand, million and billion. Only what is no number, or not a finite one, is refused here:
whoever uses the numbers knows what signs and sizes make sense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import TypeVar

from atoll.protocol.errors import ConfigError

Name = TypeVar("Name", bound=str)

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


def names(option: str, text: str, known: Sequence[Name]) -> list[Name]:
    """Words out of those known: `bf16,int4`."""
    found: dict[str, Name] = {name: name for name in known}
    for word in words(option, text):
        if word not in found:
            raise ConfigError(f"{option} {text!r}: there is no {word!r}; take {', '.join(known)}")
    return [found[word] for word in words(option, text)]


def words(option: str, text: str) -> list[str]:
    """What stands between the commas."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {text!r}: nothing stands where a value should; write a list as in 1,5")
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
