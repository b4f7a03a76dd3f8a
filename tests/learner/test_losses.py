from __future__ import annotations

import pytest
import torch

from atoll.learner.step_stats import LossReader


def test_no_loss_is_known_before_one_was_given() -> None:
    losses = LossReader()
    assert losses.latest() is None
    losses.add(None)
    assert losses.latest() is None


def test_numbers_and_tensors_are_known_at_once() -> None:
    losses = LossReader()
    losses.add(1.5)
    assert losses.latest() == 1.5
    losses.add(torch.tensor(2.5, requires_grad=True))
    assert losses.latest() == 2.5
    losses.add(torch.tensor(3.5, dtype=torch.bfloat16))
    assert losses.latest() == 3.5


def test_a_step_without_a_loss_keeps_the_last() -> None:
    losses = LossReader()
    losses.add(1.0)
    losses.add(None)
    assert losses.latest() == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_adding_waits_for_nothing(self) -> None:
        losses, value = LossReader(), torch.tensor(4.0, device="cuda")
        losses.add(value + 0)  # the first allocation of pinned memory may wait, and so may loading a kernel
        torch.cuda.synchronize()
        assert losses.latest() == 4.0
        torch.cuda._sleep(2_000_000_000)
        losses.add(value + 1)
        assert not torch.cuda.current_stream().query(), "the device still works"
        assert losses.latest() == 4.0
        torch.cuda.synchronize()
        assert losses.latest() == 5.0
