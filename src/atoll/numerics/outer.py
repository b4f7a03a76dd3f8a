"""The outer step: an outer gradient applied to one fragment.

Rules kept here: all in float32, element by element, so that a journal of outer gradients gives Θ and the optimizer's
state again bit for bit; the state is the caller's, as one array per slot and fragment, zero before the first step.
Merged buffers take their mean as it is, without learning rate or momentum: Θ ← Θ − Δ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment
from atoll.protocol.errors import ConfigError

CACHED = 65_536
"""Elements copied at a time, so that the step finds them in cache."""


class OuterOptimizer(Protocol):
    @property
    def name(self) -> str: ...

    def slots(self) -> tuple[str, ...]:
        """The names of its state arrays, each as long as the fragment."""
        ...

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        """The next version into `new_theta`, which is `theta` itself or apart from it; the state moves on in place."""
        ...


class Nesterov(msgspec.Struct, frozen=True):
    """b ← μb + Δ;  Θ ← Θ − η(Δ + μb)."""

    name: ClassVar[str] = "nesterov"
    lr: float
    momentum: float

    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        lr, mu, b, given = np.float32(self.lr), np.float32(self.momentum), state["momentum"], kernels.read_only(delta)
        for part in _copied(theta, new_theta):
            kernels.nesterov(new_theta[part], b[part], given[part], lr, mu)


class Sgd(msgspec.Struct, frozen=True):
    """Θ ← Θ − ηΔ."""

    name: ClassVar[str] = "sgd"
    lr: float

    def slots(self) -> tuple[str, ...]:
        return ()

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        given = kernels.read_only(delta)
        for part in _copied(theta, new_theta):
            kernels.sgd(new_theta[part], given[part], np.float32(self.lr))


def take_outer_step(
    optimizer: OuterOptimizer,
    fragment: Fragment,
    theta: FloatArray,
    new_theta: FloatArray,
    state: dict[str, FloatArray],
    delta: FloatArray,
) -> None:
    """A whole fragment's next version into `new_theta`: its parameters by the optimizer, its buffers by Δ alone."""
    buffers = fragment.buffers
    for part in (slice(0, buffers.start), slice(buffers.stop, fragment.size)):
        held = {name: values[part] for name, values in state.items()}
        optimizer.step(theta[part], new_theta[part], held, delta[part])
    if buffers.stop > 0:
        _AS_IT_IS.step(theta[buffers], new_theta[buffers], {}, delta[buffers])


_AS_IT_IS = Sgd(1.0)


def make_outer(name: str, lr: float, momentum: float) -> OuterOptimizer:
    if not 0 < lr < float("inf"):
        raise ConfigError(f"outer learning rate {lr} must be a number above 0, such as 0.7")
    if not 0 <= momentum < 1:
        raise ConfigError(f"outer momentum {momentum} must be at least 0 and below 1, such as 0.5")
    if name == "nesterov":
        return Nesterov(lr, momentum)
    if name == "sgd":
        return Sgd(lr)
    raise ConfigError(f"outer optimizer {name!r} is not known: use nesterov or sgd")


def _copied(theta: FloatArray, new_theta: FloatArray) -> Iterator[slice]:
    """Parts of the fragment, each of which `new_theta` holds Θ in by the time it is named."""
    assert theta.shape == new_theta.shape, "both are one whole fragment"
    in_place = theta.ctypes.data == new_theta.ctypes.data
    if in_place:
        yield slice(0, theta.size)
        return
    for start in range(0, theta.size, CACHED):
        part = slice(start, start + CACHED)
        np.copyto(new_theta[part], theta[part])
        yield part
