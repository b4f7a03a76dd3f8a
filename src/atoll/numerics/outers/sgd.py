"""Plain SGD: Θ ← Θ − ηΔ."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.numerics.compiled import read_only


class Sgd(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "sgd"
    lr: float

    def slots(self) -> tuple[str, ...]:
        return ()

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        kernels.sgd(read_only(theta), new_theta, read_only(delta), np.float32(self.lr))

    def effective_step(self, rho: float) -> float:
        """η, whatever the gradients have in common."""
        return self.lr

    def update(self, state: dict[str, FloatArray], delta: FloatArray, out: FloatArray) -> None:
        np.multiply(delta, np.float32(self.lr), out=out)

    def advance(self, state: dict[str, FloatArray], update: FloatArray) -> None:
        """It has no state."""


def make(lr: float, momentum: float) -> Sgd:
    return Sgd(lr)
