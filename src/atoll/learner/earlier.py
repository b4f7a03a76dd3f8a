"""A learner's whole state, beyond its life: what is kept of it, and what a later life goes on from.

A snapshot holds the model, the inner optimizer, whatever the script registered, chance, and the learner's place in its
run. Rules for going on:
- exactly (the run goes on from the same cut): all of it is as it was, and the same incarnation goes on;
- otherwise parameters are the run's, and the rest is put back;
- chance is put back last, once the learner has joined: joining may use it;
- what a learner left behind when its machine was taken away comes before a cut's part, and is used once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from atoll.learner.inner import Optimizers
from atoll.learner.model import BufferRule
from atoll.learner.place import Place
from atoll.learner.preempt import FILE
from atoll.learner.snapshot import Snapshot, read
from atoll.learner.state import Stateful, capture, restore

PLACE = "atoll"
"""Under this name a learner's place in its run is saved beside what the script registered."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier life left."""

    snapshot: Snapshot
    exact: bool
    """All of it is to be as it was."""
    file: str


def find_earlier() -> Earlier | None:
    """What the launcher says to go on from, or what lies in this learner's folder."""
    path, exact = os.environ.get("ATOLL_STATE"), os.environ.get("ATOLL_EXACT") == "1"
    left = Path(os.environ.get("ATOLL_FOLDER", ".")) / FILE
    if not exact and "ATOLL_FOLDER" in os.environ and left.exists():
        snapshot = read(left)
        left.unlink()  # once: the next cut is newer
        return Earlier(snapshot, False, left.name)
    return Earlier(read(Path(path)), exact, Path(path).name) if path else None


class OwnState:
    def __init__(
        self, model: nn.Module, optimizers: Optimizers, extras: Mapping[str, Stateful], buffers: BufferRule = None
    ) -> None:
        """`extras`: what the script registered, by name."""
        self._model, self._optimizers, self._extras, self._buffers = model, optimizers, extras, buffers

    def capture(self, place: Place) -> Snapshot:
        return capture(self._model, self._optimizers, {**self._extras, PLACE: place}, buffers=self._buffers)

    def stand_where(self, saved: Snapshot) -> dict[str, Any]:
        """All but chance is as it was; the place it was saved at."""
        place = Place({})
        extras = {**self._extras, PLACE: place}
        restore(self._model, self._optimizers, extras, saved, rng=False, buffers=self._buffers)
        return place.state

    def put_back(self, saved: Snapshot) -> dict[str, Any]:
        """What the run does not know: optimizer, schedules, chance. The place it was saved at."""
        place = Place({})
        extras = {**self._extras, PLACE: place}
        restore(self._model, self._optimizers, extras, saved, parameters=False, buffers=self._buffers)
        return place.state
