"""What changes a version by a lossy codec, against the same in float64, and for whoever has nothing but the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import choices
from atoll.config import Config, Outer
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.numerics.fragments import make_plan
from atoll.numerics.outer import UpdatingOptimizer, make_outer
from atoll.numerics.updates import apply_update, check_version_codec, compute_rest, decode_update, encode_update
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

PART = make_plan(
    (TensorSpec("a", (3, 70), "float32"), TensorSpec("buffers/mean/b", (5,), "float32")), 1, "balanced"
).fragments[0]
numbers = st.floats(-1e3, 1e3, width=32)
rates = st.floats(2**-10, 4.0, width=32)
momenta = st.floats(0.0, 0.984375, width=32)
TINY = 1e-34
"""Some libraries have subnormal numbers flushed to zero; divided by the least rate those are below this."""


def updating(name: str, lr: float, momentum: float) -> UpdatingOptimizer:
    made = make_outer(name, lr, momentum)
    assert isinstance(made, UpdatingOptimizer)
    return made


def one(value: float) -> FloatArray:
    return np.array([value], np.float32)


@given(rates, momenta, numbers, numbers)
def test_an_update_is_what_the_step_lowers_theta_by(lr: float, mu: float, b: float, delta: float) -> None:
    outer, state, out = updating("nesterov", lr, mu), {"momentum": one(b)}, one(0)
    outer.update(state, one(delta), out)
    assert state["momentum"][0] == np.float32(b), "to ask changes nothing"
    exact = lr * (delta + mu * (mu * b + delta))
    size = lr * (abs(delta) + mu * (mu * abs(b) + abs(delta)))
    assert abs(float(out[0]) - exact) <= 4 * 2**-24 * size + TINY
    theta, moved = one(0), {"momentum": one(b)}
    outer.step(theta, theta, moved, one(delta))
    assert theta[0] == -out[0], "from zero the step itself rounds nothing"


@given(rates, momenta, numbers, numbers)
def test_the_state_moves_on_by_the_gradient_that_an_update_stands_for(
    lr: float, mu: float, b: float, update: float
) -> None:
    state = {"momentum": one(b)}
    updating("nesterov", lr, mu).advance(state, one(update))
    gradient = (update / lr - mu * mu * b) / (1 + mu)
    size = abs(update / lr) + 2 * abs(b)
    assert abs(float(state["momentum"][0]) - (mu * b + gradient)) <= 8 * 2**-24 * size + TINY


@given(st.sampled_from(["nesterov", "nesterov-last"]), rates, momenta, st.lists(numbers, min_size=1, max_size=8))
def test_without_loss_state_and_theta_go_the_way_of_the_step(
    name: str, lr: float, mu: float, deltas: list[float]
) -> None:
    outer = updating(name, lr, mu)
    theta, state, size = one(1), {"momentum": one(0)}, 0.0
    again, b = one(1), {"momentum": one(0)}
    for delta in deltas:
        size = mu * size + abs(delta)
        outer.step(theta, theta, state, one(delta))
        update = one(0)
        outer.update(b, one(delta), update)
        again -= update
        outer.advance(b, update)
        assert abs(float(b["momentum"][0]) - float(state["momentum"][0])) <= 1e-5 * size + TINY
    np.testing.assert_allclose(again, theta, rtol=0, atol=1e-4 * (1 + lr * len(deltas) * size))


@pytest.mark.parametrize("name", ["nesterov", "nesterov-last"])
@pytest.mark.parametrize("lr", [0.0, 1e-50, 1e-40])
def test_without_a_learning_rate_no_update_stands_for_a_gradient(name: str, lr: float) -> None:
    state = {"momentum": one(2.0)}
    updating(name, lr, 0.5).advance(state, one(3.0))
    assert state["momentum"][0] == 1.0


def test_sgd_has_no_state_to_move() -> None:
    outer, out, state = updating("sgd", 0.5, 0.0), one(0), dict[str, FloatArray]()
    outer.update(state, one(3.0), out)
    outer.advance(state, out)
    assert (out[0], state) == (1.5, {})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(choices.CODEC.names()), st.sampled_from(choices.OUTER_OPTIMIZER.names()), st.integers(0, 2**32))
def test_feedback_makes_up_for_what_the_bytes_leave_out(codec: str, name: str, seed: int) -> None:
    """After any number of rounds: Θ lowered by all updates, and the feedback, is what all t without loss would give."""
    by, dice = make_codec(codec), np.random.default_rng(seed)
    outer = make_outer(name, 0.6, 0.5)
    theta = start = dice.standard_normal(PART.size).astype(np.float32)
    state = {"momentum": np.zeros(PART.size, np.float32)}
    feedback = np.zeros(PART.size, np.float32) if by.needs_feedback else None
    wanted = start.astype(np.float64)
    for _ in range(6):
        gradient = dice.standard_normal(PART.size).astype(np.float32)
        _, alone = encode_update(by, PART, outer, state, gradient, None)
        data, total = encode_update(by, PART, outer, state, gradient, feedback)
        assert data.size == body_nbytes(by, PART)
        update = decode_update(by, PART, data)
        new = np.empty_like(theta)
        apply_update(outer, PART, theta, new, state, update)
        assert new.tobytes() == (theta - update).tobytes(), "the bytes and the version before are all it takes"
        rest = compute_rest(PART, total, update)
        assert not rest[PART.buffers].any()
        theta, wanted = new, wanted - alone
        feedback = rest if by.needs_feedback else None
    if feedback is not None:
        kept = slice(0, PART.buffers.start) if PART.buffers.start else slice(PART.buffers.stop, PART.size)
        np.testing.assert_allclose((theta - feedback)[kept], wanted[kept], rtol=0, atol=1e-4)


def test_merged_buffers_go_towards_the_mean_and_never_past_it() -> None:
    gradient = np.linspace(-1, 1, PART.size).astype(np.float32)
    outer, state = make_outer("nesterov", 0.6, 0.5), {"momentum": np.zeros(PART.size, np.float32)}
    data, _ = encode_update(make_codec("int4"), PART, outer, state, gradient, None)
    moved = decode_update(make_codec("int4"), PART, data)[PART.buffers]
    assert (np.abs(moved) <= np.abs(gradient[PART.buffers])).all()
    np.testing.assert_allclose(moved, gradient[PART.buffers], rtol=2**-7)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda data: data[:-1], "a body of .* bytes came, int4 of"),
        (lambda data: np.concatenate([data, data[:1]]), "a body of .* bytes came"),
        (lambda data: np.where(np.arange(data.size) == 11, 0x7F, data).astype(np.uint8), "scale that is not fin"),
    ],
)
def test_bytes_that_are_no_update_are_refused(spoil: object, text: str) -> None:
    by, state = make_codec("int4"), {"momentum": np.zeros(PART.size, np.float32)}
    data, _ = encode_update(by, PART, make_outer("sgd", 1.0, 0.0), state, np.ones(PART.size, np.float32), None)
    with pytest.raises(ValueError, match=text):
        decode_update(by, PART, spoil(data))  # type: ignore[operator]


def test_an_outer_optimizer_that_cannot_say_its_update_is_refused_with_a_lossy_version_codec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_version_codec("int4", "nesterov")
    monkeypatch.setattr("atoll.numerics.outers.sgd.make", lambda lr, momentum: object())
    check_version_codec("fp32", "sgd")
    with pytest.raises(ConfigError, match=r"needs an outer optimizer with `update` and `advance`.*'sgd' does not"):
        Config(protocol=Settings(version_codec="int4"), outer=Outer(optimizer="sgd"))


def test_an_unknown_version_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="version_codec = 'int3' is not known: use one of"):
        Config(protocol=Settings(version_codec="int3"))
