"""Named ways in which a learner can give what it should not: with its numbers, with its words, or with noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from atoll.protocol.messages import Contribution

Numbers = Callable[[np.ndarray], np.ndarray]
"""What becomes of an honest Δ."""
Words = Callable[[Contribution], list[Contribution]]
"""What is said instead of an honest contribution."""


def _honest(contribution: Contribution) -> list[Contribution]:
    return [contribution]


def _same(delta: np.ndarray) -> np.ndarray:
    return delta


def _with(**values: int | str) -> Words:
    return lambda contribution: [msgspec.structs.replace(contribution, **values)]


@dataclass(frozen=True, slots=True)
class Attack:
    says: str
    numbers: Numbers = _same
    words: Words = _honest
    size: int = 0
    """Bytes that its bodies are longer (or, below 0, shorter) than they should be."""
    noise: bytes = b""
    """A frame that it sends beside everything else."""


def _one(value: float) -> Numbers:
    def change(delta: np.ndarray) -> np.ndarray:
        spoiled = delta.copy()
        spoiled[spoiled.size // 2] = value
        return spoiled

    return change


ATTACKS: dict[str, Attack] = {
    "nan": Attack("one of its numbers is NaN", _one(float("nan"))),
    "inf": Attack("one of its numbers is Inf", _one(float("inf"))),
    "huge": Attack("its numbers are a million times too large", lambda delta: 1e6 * (delta + 1e-3)),
    "short": Attack("its bodies end too soon", size=-2),
    "long": Attack("its bodies go on for too long", size=64),
    "stale": Attack("it gives on a base that is long past", words=_with(base=-1)),
    "future": Attack("it gives on a base that never was", words=_with(base=10**6)),
    "other-fragment": Attack("it gives another fragment than was asked for", words=_with(fragment=10**4)),
    "below-zero": Attack("it counts steps below zero", words=_with(steps=-5)),
    "boast": Attack("it names a billion tokens", words=_with(tokens=10**9)),
    "other-run": Attack("what it gives is meant for another run", words=_with(run="another")),
    "digest": Attack("it names another digest than its bodies have", words=_with(digest="0" * 32)),
    "garbage": Attack("it sends frames that are no messages", noise=b"\xff\x00{not a message"),
    "unknown-type": Attack("it sends messages of a kind nobody knows", noise=b'{"type":"Overthrow","clock":{}}'),
    "unknown-field": Attack("it sends fields nobody knows", noise=b'{"type":"Heartbeat","sudo":true}'),
    "duplicate": Attack("it says everything twice", words=lambda contribution: [contribution, contribution]),
}
HARMLESS = ("duplicate",)
"""Its numbers are honest, and are merged, once."""
