"""A learner's counters, as its training process last told them, and whether they fit together.

Rules kept here, each with its test: an adoption at a boundary whose step is not told yet waits for that step's report,
which says both; between an order to forget and the next word of the training process its counters are of two lives, and
are not told; a new life has taken none of its samples.
"""

from __future__ import annotations

import msgspec

from atoll.protocol.effects import Adopted, Stepped


class Counters:
    def __init__(self) -> None:
        self.last = Stepped(0, (), ())
        self._half_told = False
        """It adopted at a boundary whose step is not told yet."""
        self._forgetting = False
        """It was told to forget, and is in the middle of a step for all we know."""

    @property
    def t(self) -> int:
        return self.last.t

    @property
    def fit(self) -> bool:
        """Whether they are all of one moment and of one life."""
        return not self._half_told and not self._forgetting

    def stepped(self, told: Stepped) -> None:
        self.last, self._half_told, self._forgetting = told, False, False

    def adopted(self, told: Adopted) -> None:
        self._forgetting = False
        if told.t > self.t:
            self._half_told = True  # the report of that step is on its way, with all counters as they are then
        else:
            self.last = counted(self.last, told)

    def forget(self, fragments: int, *, in_a_step: bool) -> None:
        self.last = forgotten(self.last, fragments)
        self._forgetting |= in_a_step


def counted(stepped: Stepped, adopted: Adopted) -> Stepped:
    """The counters after an adoption."""
    if not stepped.steps:
        return stepped
    rows = {}
    for name in ("steps", "tokens", "dropped", "missed"):
        row = list(getattr(stepped, name)) or [0] * len(stepped.steps)
        row[adopted.fragment] = getattr(adopted, name)
        rows[name] = tuple(row)
    return msgspec.structs.replace(stepped, **rows)


def forgotten(stepped: Stepped, fragments: int) -> Stepped:
    """The counters of another life, which has taken none of its samples yet."""
    zeros = (0,) * fragments
    rows = {"steps": zeros, "tokens": zeros, "dropped": zeros, "missed": zeros}
    return msgspec.structs.replace(stepped, **rows, position=min(0, stepped.position))
