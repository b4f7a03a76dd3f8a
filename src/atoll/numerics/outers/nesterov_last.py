"""Nesterov's step without looking ahead, for the last cycle of a run: b ← μb + Δ;  Θ ← Θ − η(Δ + μ²b), b of before.

Nesterov's step lowers Θ by η(Δ + μΔ + μ²b). Its μΔ goes ahead to where the next gradient is measured. In the last cycle
none follows that could correct it (docs/adr/0039). An update û stands for the gradient Δ̂ = û/η − μ²b.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from atoll.numerics.arrays import FloatArray


class NesterovLast(msgspec.Struct, frozen=True):
    name: ClassVar[str] = "nesterov-last"
    lr: float
    momentum: float

    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        update = np.empty_like(delta)
        self.update(state, delta, update)
        with _quiet():
            np.subtract(theta, update, out=new_theta)
            state["momentum"] *= np.float32(self.momentum)
            state["momentum"] += delta

    def effective_step(self, rho: float) -> float:
        """η(1 + μ²ρ/(1 − μρ)): along a gradient lie ρ of the last one, ρ² of the one before, and so on."""
        return self.lr * (1 + self.momentum**2 * rho / (1 - self.momentum * rho))

    def update(self, state: dict[str, FloatArray], delta: FloatArray, out: FloatArray) -> None:
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        with _quiet():
            np.multiply(state["momentum"], mu * mu, out=out)
            out += delta
            out *= lr

    def advance(self, state: dict[str, FloatArray], update: FloatArray) -> None:
        """b ← μb + Δ̂. Where η is 0 no update stands for any gradient: b ← μb."""
        lr, mu, b = np.float32(self.lr), np.float32(self.momentum), state["momentum"]
        with _quiet():
            inverse = np.float32(1) / lr
            b *= mu
            if np.isfinite(inverse):
                b += inverse * update - mu * b


def _quiet() -> np.errstate:
    """What is not finite is found when the version is checked."""
    return np.errstate(divide="ignore", over="ignore", invalid="ignore")


make = NesterovLast
