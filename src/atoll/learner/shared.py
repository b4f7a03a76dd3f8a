"""The memory that a learner shares with its courier, and the boundary at which the model meets it.

It is made when the run's settings are known, or filled with what a cut kept of it. It outlives a courier: the next one
finds counters, versions and base in it. When the run cuts its model another way than before, it is made anew.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from atoll.learner.boundary import Boundary
from atoll.learner.courier_process import CourierProcess
from atoll.learner.model import BufferRule, describe, merged
from atoll.learner.place import fill_box, settings_of
from atoll.learner.recorder import Recorder
from atoll.mailbox.box import Mailbox, cut_alike
from atoll.mailbox.channel import Box, Welcomed
from atoll.numerics.fragments import Plan, make_plan
from atoll.protocol.effects import Stepped
from atoll.protocol.errors import PlanError
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings


class Shared:
    def __init__(self, model: nn.Module, courier: CourierProcess, tape: Recorder, buffers: BufferRule = None) -> None:
        self._model, self._courier, self._tape, self._buffers = model, courier, tape, buffers
        self.tensors: tuple[TensorSpec, ...] = ()
        self.box: Mailbox | None = None
        self.boundary: Boundary | None = None
        """Both are there once the run's settings are known; a box that is closed can still be read."""
        self._newest: tuple[int, ...] | None = None
        """The run's versions at the last welcome."""
        self.index = -1
        """This learner's number in the run, as the last welcome said."""

    def describe(self) -> None:
        """ConfigError: this model cannot take part."""
        self.tensors = describe(self._model, self._buffers)

    def welcomed(self, frame: Welcomed) -> bool:
        """The run's settings are known: cut the model as they say. True: the courier is to get other memory."""
        self._newest, self.index = frame.versions, frame.index
        plan = make_plan(self.tensors, frame.settings.fragments, frame.settings.plan)
        if plan.fingerprint != frame.fingerprint:
            raise PlanError("the run cuts its model another way than this version of Atoll: install the same version")
        if self.box is not None and self.boundary is not None:
            same_plan = self.box.plan.fingerprint == plan.fingerprint
            if same_plan and cut_alike(plan, self.boundary.settings, frame.settings):
                self.boundary.settings = frame.settings
                return False
            self.close()
        box, _ = self._make(plan, frame.settings)
        box.set_count("incarnation", frame.incarnation)
        return True

    def stand(self, place: dict[str, Any]) -> None:
        """As it was when this place (place.py) was saved."""
        settings, self.index = settings_of(place), place.get("index", -1)
        box, boundary = self._make(make_plan(self.tensors, settings.fragments, settings.plan), settings)
        fill_box(box, place, os.environ.get("ATOLL_RUN", ""))
        boundary.stand(place["t"], place["total"], place["feed"].get("position", -1))

    def _make(self, plan: Plan, settings: Settings) -> tuple[Mailbox, Boundary]:
        self.box = Mailbox.create(plan, settings)
        taking_part = merged(self._model, self._buffers)
        self.boundary = Boundary(self.box, settings, taking_part, self._courier, self._tape)
        return self.box, self.boundary

    def hand_over(self, stepped: Stepped, *, sure: bool = False, waits: bool = False) -> None:
        """To the courier, if there is anything yet."""
        if self.box is not None and self.boundary is not None:
            self._courier.send(Box(self.boundary.settings, stepped, sure, waits=waits), self.box.fd)

    def has_parameters(self) -> bool:
        """What the run had when this learner was welcomed."""
        if self.boundary is None or self.box is None or self._newest is None or not self.boundary.recovered:
            return False
        return all(held >= newest for held, newest in zip(self.box.adopted.tolist(), self._newest, strict=False))

    def unmerged(self) -> bool:
        """There are steps that no version holds yet."""
        return self.box is not None and bool(self.box.steps.any())

    def counters(self) -> dict[str, tuple[int, ...]]:
        """Steps, tokens, and dropped and missed tokens of every fragment."""
        if (box := self.box) is None:
            return {"steps": (), "tokens": (), "dropped": (), "missed": ()}
        rows = {"steps": box.steps, "tokens": box.tokens, "dropped": box.dropped, "missed": box.missed}
        return {name: tuple(row.tolist()) for name, row in rows.items()}

    def close(self) -> None:
        if self.boundary is not None:
            self.boundary.close()
        if self.box is not None:
            self.box.close()
        self.boundary = None
