"""The global parameters and the outer optimizer's state: Θ, momentum, versions.

A committed version is never written to: the outer step writes beside it, and a commit exchanges the two. A version that
is being read by a learner stays untouched until the reader lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from atoll.config import Outer
from atoll.fabric.desk import Served
from atoll.fabric.wire import digest
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Plan, elements
from atoll.numerics.kernels import read_only, square_norms
from atoll.numerics.merge import merge
from atoll.protocol.errors import PeerError


class Buffer:
    """One fragment's values, and how many readers hold them."""

    __slots__ = ("digest", "readers", "round", "values", "version")

    def __init__(self, size: int) -> None:
        self.values: FloatArray = np.zeros(size, dtype=np.float32)
        self.readers = 0
        self.version = -1
        self.round = -1
        self.digest = ""


class Parameters:
    def __init__(self, plan: Plan, outer: Outer) -> None:
        self.plan = plan
        self._rule = outer.merge
        self._optimizer = outer.make()
        self._committed = [Buffer(part.size) for part in plan.fragments]
        self._spare: list[list[Buffer]] = [[] for _ in plan.fragments]
        self._staged: dict[int, Buffer] = {}
        self._state = [
            {name: np.zeros(part.size, dtype=np.float32) for name in self._optimizer.slots()} for part in plan.fragments
        ]
        self._delta: FloatArray = np.empty(plan.largest, dtype=np.float32)

    # ---- version 0 ----------------------------------------------------------------------------------------------

    def initial(self, fragment: int) -> memoryview:
        """Where version 0 of a fragment is received."""
        return self._committed[fragment].values.view(np.uint8).data

    def check_initial(self, fragment: int, mark: str) -> str | None:
        buffer = self._committed[fragment]
        buffer.digest = mark
        return None if _finite(buffer.values) else f"fragment {fragment} of the first parameters is not finite"

    def begin(self) -> None:
        for buffer in self._committed:
            buffer.version = 0

    # ---- rounds -------------------------------------------------------------------------------------------------

    def stage(self, fragment: int, deltas: Sequence[FloatArray], weights: Sequence[float]) -> str:
        """Merge and take the outer step beside the committed version. Returns its digest; ValueError: void."""
        part, old = self.plan.fragments[fragment], self._committed[fragment]
        delta = self._delta[: part.size]
        merge(part, deltas, weights, delta, self._rule)
        new = self._take(fragment)
        self._optimizer.step(old.values, new.values, self._state[fragment], delta)
        if not _finite(new.values):
            self._spare[fragment].append(new)
            for slot in self._state[fragment].values():
                slot.fill(0.0)  # what overflowed may be in here too
            raise ValueError("the outer step gave values that are not finite")
        new.digest = digest(new.values.view(np.uint8).data)
        self._staged[fragment] = new
        return new.digest

    def commit(self, fragment: int, version: int, round: int) -> None:
        new = self._staged.pop(fragment)
        new.version, new.round = version, round
        self._spare[fragment].append(self._committed[fragment])
        self._committed[fragment] = new

    def _take(self, fragment: int) -> Buffer:
        """A buffer that nobody reads."""
        for buffer in self._spare[fragment]:
            if buffer.readers == 0:
                self._spare[fragment].remove(buffer)
                return buffer
        return Buffer(self.plan.fragments[fragment].size)

    # ---- reading ------------------------------------------------------------------------------------------------

    def serve(self, fragment: int) -> Served:
        if not 0 <= fragment < len(self._committed):
            raise PeerError(f"there is no fragment {fragment}: the run has {len(self._committed)}")
        buffer = self._committed[fragment]
        if buffer.version < 0:
            raise PeerError("the run has no parameters yet")
        buffer.readers += 1
        return Served(buffer.version, buffer.round, buffer.digest, buffer.values.view(np.uint8).data, _once(buffer))

    def tensors(self) -> dict[str, FloatArray]:
        """The whole committed model by name."""
        whole: dict[str, FloatArray] = {}
        for part, buffer in zip(self.plan.fragments, self._committed, strict=True):
            for tensor, start in zip(part.tensors, part.offsets, strict=True):
                whole[tensor.name] = buffer.values[start : start + elements(tensor)].reshape(tensor.shape)
        return whole


def _once(buffer: Buffer) -> Callable[[], None]:
    let_go = False

    def release() -> None:
        nonlocal let_go
        if not let_go:
            let_go = True
            buffer.readers -= 1

    return release


def _finite(values: FloatArray) -> bool:
    total = np.zeros(1, dtype=np.float64)
    square_norms(read_only(values), total)
    return bool(np.isfinite(total).all())
