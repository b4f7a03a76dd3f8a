from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from atoll.learner.capture import check_random_state, random_state, set_random_state
from atoll.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _others_keep_their_draws() -> Iterator[None]:
    before = random_state()
    yield
    set_random_state(before)


def draws() -> list[Any]:
    normal = [torch.randn(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)]
    return [*normal, torch.rand(5).tolist(), np.random.rand(5).tolist(), random.random(), random.sample(range(99), 5)]


def test_what_is_drawn_after_putting_it_back_is_what_was_drawn_before() -> None:
    draws()  # an odd number of gaussians: each library has one in stock, which is part of its state
    state = random_state()
    first, second = draws(), draws()
    assert first != second
    set_random_state(state)
    assert [draws(), draws()] == [first, second]


def test_taking_the_state_draws_nothing() -> None:
    state = random_state()
    drawn = draws()
    set_random_state(state)
    random_state()
    assert draws() == drawn


def test_without_cuda_none_is_started() -> None:
    assert random_state()["cuda"] == [] or torch.cuda.is_initialized()


def test_another_number_of_devices_is_refused() -> None:
    state = random_state()
    state["cuda"] = [torch.get_rng_state()] * (torch.cuda.device_count() + 1)
    with pytest.raises(ConfigError, match=r"random states of \d CUDA devices, \d are here"):
        check_random_state(state)


@pytest.mark.parametrize("position", [-1, 625, 2**31 - 1])
def test_numpys_position_must_lie_in_its_state(position: int) -> None:
    state = random_state()
    check_random_state(state)
    state["numpy"]["state"]["pos"] = position
    with pytest.raises(ConfigError, match="numpy is damaged"):
        check_random_state(state)
