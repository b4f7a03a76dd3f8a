"""SGD with Nesterov momentum: b ← μb + Δ;  Θ ← Θ − η(Δ + μb)."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.numerics.outer import copied_parts


class Nesterov(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "nesterov"
    lr: float
    momentum: float

    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        lr, mu, b, given = np.float32(self.lr), np.float32(self.momentum), state["momentum"], kernels.read_only(delta)
        for part in copied_parts(theta, new_theta):
            kernels.nesterov(new_theta[part], b[part], given[part], lr, mu)


make = Nesterov
