"""What a check has to say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from atoll.observe.figures import span

Verdict: TypeAlias = Literal["ok", "warn", "fail"]
UNKNOWN = "this system does not say"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    value: str
    next: str = ""
    """The next step, where there is one to take."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs; units are in the names."""

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "verdict": self.verdict, "value": self.value, "next": self.next, **self.figures}


@dataclass(frozen=True, slots=True)
class Clocks:
    wall: float
    steady: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.time(), time.monotonic())


def size(value: float) -> str:
    """23 GiB, 512 MiB, 20 KiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if value >= unit:
            return f"{value / unit:.1f} {name}" if value < 10 * unit else f"{value / unit:.0f} {name}"
    return f"{value / 1024:.0f} KiB"


def brief(seconds: float) -> str:
    """0.4 ms, 12.0 ms; from a tenth of a second on as everywhere."""
    return f"{1000 * seconds:.1f} ms" if seconds < 0.0995 else span(seconds)
