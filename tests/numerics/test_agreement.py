"""ρ of merged gradients by sketches, against the cosine of the whole gradients in float64."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.numerics import sample
from atoll.numerics.agreement import GRADIENT_BUCKETS, Autocorrelation
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.outer import make_outer
from atoll.protocol.messages import TensorSpec, buffer_name

NEAR = 4 / np.sqrt(GRADIENT_BUCKETS)
"""Four standard deviations of a cosine by sketches."""


def one_fragment(*shapes: tuple[int, ...], buffer: int = 0) -> FragmentPlan:
    tensors = [TensorSpec(f"t{n}", shape, "float32") for n, shape in enumerate(shapes)]
    if buffer:
        tensors.append(TensorSpec(buffer_name("mean", "seen"), (buffer,), "float32"))
    return make_plan(tensors, 1)


def draw_gradients(size: int, rho: float, count: int, seed: int = 0) -> list[FloatArray]:
    """Each has about the cosine ρ with the one before it, ρ² with the one before that, and another length."""
    dice = np.random.default_rng(seed)
    found = [dice.standard_normal(size)]
    for _ in range(count - 1):
        found.append(rho * found[-1] + np.sqrt(1 - rho**2) * dice.standard_normal(size))
    return [(values * dice.uniform(0.5, 2.0)).astype(np.float32) for values in found]


def cosine(a: FloatArray, b: FloatArray) -> float:
    left, right = a.astype(np.float64), b.astype(np.float64)
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", [(40, 25), (300, 1000), (1300, 1000)])
def test_rho_is_the_cosine_with_the_gradient_before(shape: tuple[int, int], rho: float) -> None:
    """Fewer values than a sketch has, more, and a fragment of which a sample is taken."""
    plan = one_fragment(shape, (7,))
    size = plan.fragments[0].size
    assert (size > 2 * sample.LEAST) == (shape[0] == 1300)
    first, second, third = draw_gradients(size, rho, 3)
    trace = Autocorrelation(plan)
    assert trace.measure(0, first) is None
    for before, now in ((first, second), (second, third)):
        assert trace.measure(0, now) == pytest.approx(
            cosine(before, now), abs=NEAR if size > GRADIENT_BUCKETS else 1e-6
        )


def test_equal_gradients_have_rho_1_and_opposite_ones_rho_minus_1() -> None:
    plan = one_fragment((200, 50))
    (values,) = draw_gradients(plan.fragments[0].size, 0.0, 1)
    trace = Autocorrelation(plan)
    trace.measure(0, values)
    assert trace.measure(0, 3 * values) == pytest.approx(1.0)
    assert trace.measure(0, -values) == pytest.approx(-1.0)
    assert trace.measure(0, np.zeros_like(values)) == 0.0


def test_fragments_are_compared_with_their_own_last_gradient() -> None:
    plan = make_plan([TensorSpec(name, (8, 8), "float32") for name in "ab"], 2)
    values = np.ones(64, np.float32)
    trace = Autocorrelation(plan)
    assert (trace.measure(0, values), trace.measure(1, -values)) == (None, None)
    assert trace.measure(1, -values) == pytest.approx(1.0)


def test_merged_buffers_do_not_count() -> None:
    plan = one_fragment((30, 30), buffer=10)
    before, now = draw_gradients(plan.fragments[0].size, 0.5, 2)
    found = []
    for counter in (0.0, 1e6):
        trace = Autocorrelation(plan)
        for values in (before, now):
            values[plan.fragments[0].buffers] = counter
            rho = trace.measure(0, values)
        found.append(rho)
    assert found[0] == found[1] and found[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("momentum", "rho"), [(0.6, 0.5), (0.9, 0.9), (0.6, -0.4), (0.0, 0.7), (0.6, 1.0)])
def test_the_effective_step_is_how_far_theta_moves_along_a_gradient(momentum: float, rho: float) -> None:
    """Nesterov in float64 over gradients of equal length: the part of an update that lies along its gradient."""
    dice, mu, lr = np.random.default_rng(3), momentum, 0.7
    gradient, held, along = dice.standard_normal(20_000), np.zeros(20_000), []
    for _ in range(300):
        held = mu * held + gradient
        along.append(lr * (gradient + mu * held) @ gradient / (gradient @ gradient))
        gradient = rho * gradient + np.sqrt(1 - rho**2) * dice.standard_normal(20_000)
    assert make_outer("nesterov", lr, mu).effective_step(rho) == pytest.approx(np.mean(along[100:]), rel=0.02)
    assert make_outer("sgd", lr, mu).effective_step(rho) == lr
