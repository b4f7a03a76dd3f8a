"""SGD with Nesterov momentum: b ← μb + Δ;  Θ ← Θ − η(Δ + μb).

A step lowers Θ by u = η((1 + μ)Δ + μ²b). So an update û stands for the gradient Δ̂ = (û/η − μ²b)/(1 + μ).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.numerics.compiled import read_only


class Nesterov(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "nesterov"
    lr: float
    momentum: float

    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        kernels.nesterov(read_only(theta), new_theta, state["momentum"], read_only(delta), lr, mu)

    def effective_step(self, rho: float) -> float:
        """η(1 + μ/(1 − μρ)): along a gradient lie ρ of the last one, ρ² of the one before, and so on."""
        return self.lr * (1 + self.momentum / (1 - self.momentum * rho))

    def update(self, state: dict[str, FloatArray], delta: FloatArray, out: FloatArray) -> None:
        b, given = read_only(state["momentum"]), read_only(delta)
        kernels.nesterov_update(b, given, out, np.float32(self.lr), np.float32(self.momentum))

    def advance(self, state: dict[str, FloatArray], update: FloatArray) -> None:
        """Where η is 0 no update stands for any gradient: b ← μb."""
        lr, mu, b = np.float32(self.lr), np.float32(self.momentum), state["momentum"]
        with np.errstate(divide="ignore", over="ignore"):
            inverse, share = np.float32(1) / lr, np.float32(1) / (np.float32(1) + mu)
        if np.isfinite(inverse):
            kernels.nesterov_advance(b, read_only(update), inverse, mu, share)
        else:
            np.multiply(b, mu, out=b)


make = Nesterov
