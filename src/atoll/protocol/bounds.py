"""How long what a peer says may be, and how large its numbers, by their types: checked while it is read.

Every text, every row and every number of a message, a tape or a score has one of these; a test walks the types and
finds none without. NaN and infinities are within no bounds.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

LONGEST = 64
ALLOWED = f"use 1 to {LONGEST} of a-z, A-Z, 0-9, '.', '_' and '-', with a letter or a digit first"
"""Of the name of a learner, a session, a process or a token. Names become parts of paths and addresses as they are, so
none begins with a dot or a dash: `..` is no learner, and no file is hidden or taken for an option."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")

MOST = 2**48
"""Counters stay below it, so that sums of them over a run's learners fit everywhere they are written down."""
FAR = 1e30
"""The same for what is measured; a loss beyond it is as good as none."""
LINE = 1000
MANY = 65536
"""Fragments, tensors, leases or members in one message."""

Number = Annotated[int, Meta(gt=-MOST, lt=MOST)]
"""What a peer counts; what may be below zero, and what it means, the rules say (rules.py)."""
Count = Annotated[int, Meta(ge=0, lt=MOST)]
Real = Annotated[float, Meta(gt=-FAR, lt=FAR)]
Seconds = Annotated[float, Meta(ge=0, lt=float(MOST))]
Name = Annotated[str, Meta(max_length=LONGEST)]
ChoiceName = Annotated[str, Meta(pattern="^[a-z0-9-]{1,32}$")]
"""Of a piece of code that does the arithmetic: a codec, an adoption rule, a plan. The rules only pass it on."""
Direction = Literal["min", "max"]
"""Which values of a metric are better: small ones or large ones."""
Line = Annotated[str, Meta(max_length=LINE)]
"""What a learner says in words: what it says may be kept, and is to stay small."""
Words = Annotated[str, Meta(max_length=8 * LINE)]
"""What the syncer says: a few lines of learners may be in it."""
Row = Annotated[tuple[Number, ...], Meta(max_length=MANY)]
"""A number for each fragment, or for each of something else."""


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def near(value: float | None) -> float | None:
    """The value, if it is a number that may be sent."""
    return value if value is not None and -FAR < value < FAR else None


def clipped(text: str, most: int = LINE) -> str:
    """The text, or its beginning where there is more of it than may be kept."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
