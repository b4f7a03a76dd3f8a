"""The outer step: an outer gradient applied to one fragment, by one of the optimizers in outers/.

Rules kept here: all in float32, element by element, so that a journal of outer gradients gives Θ and the optimizer's
state again bit for bit; the state is the caller's, as one array per slot and fragment, zero before the first step.
Merged buffers take their mean as it is, without learning rate or momentum: Θ ← Θ − Δ.

Where versions come down by a lossy codec, the step is taken in two pieces (updates.py): `update` says what Θ would be
lowered by, and `advance` moves the state on by the gradient that what Θ was really lowered by stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from atoll.choices import OUTER_OPTIMIZER
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment

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


@runtime_checkable
class UpdatingOptimizer(OuterOptimizer, Protocol):
    def update(self, state: dict[str, FloatArray], delta: FloatArray, out: FloatArray) -> None:
        """What Θ would be lowered by. The state stays as it is."""
        ...

    def advance(self, state: dict[str, FloatArray], update: FloatArray) -> None:
        """Θ was lowered by this: the state moves on, in place, by the gradient that it stands for."""
        ...


def take_outer_step(
    optimizer: OuterOptimizer,
    fragment: Fragment,
    theta: FloatArray,
    new_theta: FloatArray,
    state: dict[str, FloatArray],
    delta: FloatArray,
) -> None:
    """A whole fragment's next version into `new_theta`: its parameters by the optimizer, its buffers by Δ alone."""
    for part, held in _parameters_of(fragment, state):
        optimizer.step(theta[part], new_theta[part], held, delta[part])
    buffers = fragment.buffers
    if buffers.stop > 0:
        np.subtract(theta[buffers], delta[buffers], out=new_theta[buffers])


def compute_update(
    optimizer: UpdatingOptimizer,
    fragment: Fragment,
    state: dict[str, FloatArray],
    delta: FloatArray,
    out: FloatArray,
) -> None:
    """What a whole fragment's Θ would be lowered by: its parameters as the optimizer says, its buffers by Δ."""
    for part, held in _parameters_of(fragment, state):
        optimizer.update(held, delta[part], out[part])
    out[fragment.buffers] = delta[fragment.buffers]


def advance_state(
    optimizer: UpdatingOptimizer, fragment: Fragment, state: dict[str, FloatArray], update: FloatArray
) -> None:
    """A whole fragment's Θ was lowered by this."""
    for part, held in _parameters_of(fragment, state):
        optimizer.advance(held, update[part])


def _parameters_of(fragment: Fragment, state: dict[str, FloatArray]) -> Iterator[tuple[slice, dict[str, FloatArray]]]:
    """The parameters before the buffers and those behind them, with their outer state."""
    for part in (slice(0, fragment.buffers.start), slice(fragment.buffers.stop, fragment.size)):
        yield part, {name: values[part] for name, values in state.items()}


def make_outer(name: str, lr: float, momentum: float) -> OuterOptimizer:
    made: OuterOptimizer = OUTER_OPTIMIZER.load(name).make(lr, momentum)
    return made


def copied_parts(theta: FloatArray, new_theta: FloatArray) -> Iterator[slice]:
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
