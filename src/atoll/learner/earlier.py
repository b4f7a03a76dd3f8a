"""A learner's whole state, beyond its life: what is kept of it, and what a later life goes on from.

A snapshot holds the model, the inner optimizer, whatever the script registered, chance, and the learner's place in its
run. Rules for going on:
- exactly (the run goes on from the same cut): all of it is as it was, and the same incarnation goes on;
- otherwise parameters are the run's, and the rest is put back;
- chance is put back last, once the learner has joined: joining may use it;
- what a learner left behind when its machine was taken away comes before a cut's part, and is used once;
- a supervisor names the part to go on from, or none (ATOLL_STATE). Where nobody does, a learner started by hand goes on
  from the newest part in its own folder, if that is of this run and fits; if not, it says so and begins afresh.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from atoll.learner.inner import Optimizers
from atoll.learner.model import BufferRule
from atoll.learner.place import Place
from atoll.learner.preempt import FILE
from atoll.learner.saving import list_parts, read_run
from atoll.learner.snapshot import Snapshot, read
from atoll.learner.state import Stateful, capture, restore
from atoll.protocol.errors import AtollError

PLACE = "atoll"
"""Under this name a learner's place in its run is saved beside what the script registered."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier life left."""

    snapshot: Snapshot
    exact: bool
    """All of it is to be as it was."""
    file: str
    run: str = ""
    """Of what nobody named: the run that it has to be of, where its folder says so."""


def find_earlier(folder: Path | None, run: str = "") -> Earlier | None:
    """What the launcher says to go on from, or what lies in this learner's folder. `run`: the one that it joins, where
    its link says so."""
    path, exact = os.environ.get("ATOLL_STATE"), os.environ.get("ATOLL_EXACT") == "1"
    of = read_run(folder) if folder is not None else ""
    other = bool(run and of and run != of)
    if folder is not None and not exact and not other and (left := folder / FILE).exists():
        snapshot = read(left)
        left.unlink()  # once: the next cut is newer
        return Earlier(snapshot, False, left.name, run=of)
    if path:
        return Earlier(read(Path(path)), exact, Path(path).name)
    if path is None and folder is not None and of and not other:
        return _find_own_part(folder, of)
    return None


def _find_own_part(folder: Path, run: str) -> Earlier | None:
    """The newest that can be read; None: there is none."""
    for part in reversed(list_parts(folder)):
        with suppress(AtollError, OSError):
            return Earlier(read(part), False, part.name, run=run)
    return None


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
