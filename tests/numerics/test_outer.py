from __future__ import annotations

import numpy as np
import pytest

from atoll.config import Outer
from atoll.numerics.outer import make_outer
from atoll.protocol.errors import ConfigError


def test_nesterov_by_hand() -> None:
    """η = 0.5, μ = 0.5, Δ = 1 twice: b = 1, 1.5; Θ = 4 − 0.75 − 0.875."""
    outer = make_outer("nesterov", 0.5, 0.5)
    theta, delta, state = np.array([4], np.float32), np.ones(1, np.float32), {"momentum": np.zeros(1, np.float32)}
    outer.step(theta, theta, state, delta)
    assert (theta[0], state["momentum"][0]) == (3.25, 1.0)
    outer.step(theta, theta, state, delta)
    assert (theta[0], state["momentum"][0]) == (2.375, 1.5)


def test_the_last_step_of_nesterov_does_not_look_ahead() -> None:
    """η = 0.5, μ = 0.5, b = 4, Δ = 2: Θ = 4 − 0.5 (2 + 0.25 · 4). Nesterov's own step takes 0.5 · 0.5 · 2 more."""
    theta, delta, state = np.array([4], np.float32), np.array([2], np.float32), {"momentum": np.array([4], np.float32)}
    ahead, beside = np.empty(1, np.float32), {"momentum": state["momentum"].copy()}
    make_outer("nesterov", 0.5, 0.5).step(theta, ahead, beside, delta)
    make_outer("nesterov-last", 0.5, 0.5).step(theta, theta, state, delta)
    assert (theta[0], state["momentum"][0]) == (2.5, 4.0) and state["momentum"] == beside["momentum"]
    assert ahead[0] == theta[0] - 0.5


def test_sgd_by_hand() -> None:
    theta = np.array([1, -1], np.float32)
    make_outer("sgd", 2.0, 0.0).step(theta, theta, {}, np.array([3, 0.5], np.float32))
    assert theta.tolist() == [-5, -2]


def test_lr_one_without_momentum_gives_the_mean_of_the_learners() -> None:
    """η = 1, μ = 0 is local SGD: Θ − (Θ − θ) = θ."""
    base, theta = np.array([2.0, 8.0], np.float32), np.array([1.0, 9.0], np.float32)
    for name in ("sgd", "nesterov"):
        new = np.empty(2, np.float32)
        make_outer(name, 1.0, 0.0).step(base, new, {"momentum": np.zeros(2, np.float32)}, base - theta)
        assert new.tolist() == theta.tolist()


def test_nesterov_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(100).astype(np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    theirs = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    ours, state = make_outer("nesterov", 0.7, 0.9), {"momentum": np.zeros(100, np.float32)}
    for _ in range(5):
        delta = rng.standard_normal(100).astype(np.float32)
        weight.grad = torch.from_numpy(delta.copy())
        theirs.step()
        ours.step(theta, theta, state, delta)
    np.testing.assert_allclose(theta, weight.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nesterov", "nesterov-last", "sgd"])
@pytest.mark.parametrize("size", [1, 100, 4099])
def test_in_place_and_apart_give_the_same_bits(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    theta, b, delta = (rng.standard_normal(size).astype(np.float32) for _ in range(3))
    outer, before = make_outer(name, 0.7, 0.6), theta.copy()
    apart, first = np.empty_like(theta), {"momentum": b.copy()}
    outer.step(theta, apart, first, delta)
    assert theta.tobytes() == before.tobytes()
    second = {"momentum": b.copy()}
    outer.step(theta, theta, second, delta)
    assert theta.tobytes() == apart.tobytes()
    assert first["momentum"].tobytes() == second["momentum"].tobytes()


def test_names_and_slots() -> None:
    assert [(make_outer(n, 0.7, 0.5).name, make_outer(n, 0.7, 0.5).slots()) for n in ("nesterov", "sgd")] == [
        ("nesterov", ("momentum",)),
        ("sgd", ()),
    ]


@pytest.mark.parametrize(
    ("name", "lr", "momentum", "text"),
    [
        ("nonsense", 0.7, 0.5, "outer_optimizer = 'nonsense' is not known: use one of "),
        ("sgd", 0.0, 0.5, "outer learning rate 0.0 must be a number above 0"),
        ("sgd", float("nan"), 0.5, "outer learning rate nan"),
        ("sgd", float("inf"), 0.5, "outer learning rate inf"),
        ("nesterov", 0.7, 1.0, "outer momentum 1.0 must be at least 0 and below 1"),
        ("nesterov", 0.7, -0.1, "outer momentum -0.1"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, lr: float, momentum: float, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Outer(optimizer=name, lr=lr, momentum=momentum)
