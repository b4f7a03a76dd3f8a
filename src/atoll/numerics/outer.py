"""The outer step: an outer gradient applied to one fragment, by one of the optimizers in outers/.

Rules kept here: all in float32, element by element, so that a journal of outer gradients gives Θ and the optimizer's
state again bit for bit; the state is the caller's, as one array per slot and fragment, zero before the first step.
Merged buffers take their mean as it is, without learning rate or momentum: Θ ← Θ − Δ.

Where versions come down by a lossy codec, the step is taken in two pieces (updates.py): `update` says what Θ would be
lowered by, and `advance` moves the state on by the gradient that what Θ was really lowered by stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from atoll.choices import OUTER_OPTIMIZER
from atoll.numerics.arrays import FloatArray
from atoll.numerics.compiled import PART, in_parts
from atoll.numerics.fragments import Fragment, Piece


class OuterOptimizer(Protocol):
    @property
    def name(self) -> str: ...

    def slots(self) -> tuple[str, ...]:
        """The names of its state arrays, each as long as the fragment."""
        ...

    def step(self, theta: FloatArray, new_theta: FloatArray, state: dict[str, FloatArray], delta: FloatArray) -> None:
        """The next version into `new_theta`, which is `theta` itself or apart from it; the state moves on in place."""
        ...

    def effective_step(self, rho: float) -> float:
        """How far Θ moves in the end for each gradient, where each has the cosine ρ with the one before it."""
        ...


@runtime_checkable
class UpdatingOptimizer(OuterOptimizer, Protocol):
    def update(self, state: dict[str, FloatArray], delta: FloatArray, out: FloatArray) -> None:
        """What Θ would be lowered by. The state stays as it is."""
        ...

    def advance(self, state: dict[str, FloatArray], update: FloatArray) -> None:
        """Θ was lowered by this: the state moves on, in place, by the gradient that it stands for."""
        ...


def lacks_momentum(optimizer: OuterOptimizer) -> bool:
    """Momentum is off: what lies in its array is the last gradient alone, which no step uses."""
    return getattr(optimizer, "momentum", None) == 0.0


def starts_momentum(before: OuterOptimizer, after: OuterOptimizer) -> bool:
    """Momentum was off and is on from now: its array is set to zero."""
    return lacks_momentum(before) and not lacks_momentum(after)


def take_outer_step(
    optimizer: OuterOptimizer,
    fragment: Fragment,
    theta: FloatArray,
    new_theta: FloatArray,
    state: dict[str, FloatArray],
    delta: FloatArray,
) -> None:
    """A whole fragment's next version into `new_theta`: its parameters by the optimizer, its buffers by Δ alone."""
    for piece, part in fragment.parts:
        take_piece_step(optimizer, piece, theta[part], new_theta[part], cut_state(state, part), delta[part])


def take_piece_step(
    optimizer: OuterOptimizer,
    piece: Piece,
    theta: FloatArray,
    new_theta: FloatArray,
    state: dict[str, FloatArray],
    delta: FloatArray,
) -> None:
    """The same for one piece, or for some of its rows."""
    if piece.tensor.buffer_rule:
        np.subtract(theta, delta, out=new_theta)
    else:
        optimizer.step(theta, new_theta, state, delta)


def compute_update(
    optimizer: UpdatingOptimizer,
    fragment: Fragment,
    state: dict[str, FloatArray],
    delta: FloatArray,
    out: FloatArray,
    threads: int = 1,
) -> None:
    """What a whole fragment's Θ would be lowered by: its parameters as the optimizer says, its buffers by Δ."""

    def work(part: slice) -> None:
        optimizer.update(cut_state(state, part), delta[part], out[part])

    _work_on_parameters(fragment, work, threads)
    out[fragment.buffers] = delta[fragment.buffers]


def advance_state(
    optimizer: UpdatingOptimizer,
    fragment: Fragment,
    state: dict[str, FloatArray],
    update: FloatArray,
    threads: int = 1,
) -> None:
    """A whole fragment's Θ was lowered by this."""
    _work_on_parameters(fragment, lambda part: optimizer.advance(cut_state(state, part), update[part]), threads)


def cut_state(state: dict[str, FloatArray], part: slice) -> dict[str, FloatArray]:
    return {name: values[part] for name, values in state.items()}


def _work_on_parameters(fragment: Fragment, work: Callable[[slice], None], threads: int) -> None:
    """Those before the buffers and those behind them."""
    behind = fragment.buffers.stop
    in_parts(lambda a, b: work(slice(a, b)), fragment.buffers.start, PART, threads)
    in_parts(lambda a, b: work(slice(behind + a, behind + b)), fragment.size - behind, PART, threads)


def make_outer(name: str, lr: float, momentum: float) -> OuterOptimizer:
    made: OuterOptimizer = OUTER_OPTIMIZER.load(name).make(lr, momentum)
    return made
