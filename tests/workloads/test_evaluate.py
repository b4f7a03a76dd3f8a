"""Validation is deterministic and leaves the model as it was; what the model writes is safe to print."""

import pytest
import torch

from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text
from atoll.workloads.training import build_model, held_out_windows, readable, sample, validation_loss

SMALL = WorkloadSettings(depth=1, block=16)


def test_validation_is_the_mean_over_its_windows_whatever_the_batch() -> None:
    model = build_model(SMALL, seed=0)
    text = Text(bytes(range(256)) * 40)
    whole = float(model(held_out_windows(text, 16, 10)).detach())
    assert validation_loss(model, text, 10, batch=3) == pytest.approx(whole, rel=1e-6)
    assert validation_loss(model, text, 10) == validation_loss(model, text, 10)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_sample_repeats_and_its_prompts_stand_in_it() -> None:
    model = build_model(SMALL, seed=0)
    torch.nn.init.normal_(model.embedding.weight, generator=torch.Generator().manual_seed(0))
    assert sample(model, seed=1, length=20) == sample(model, seed=1, length=20)


def test_written_text_is_safe_to_print() -> None:
    assert readable(b"def a\x1b[31m():\n    pass\nhalf a li") == "def a\N{REPLACEMENT CHARACTER}[31m():\n    pass"
    assert readable(b"one \xff line") == "one \N{REPLACEMENT CHARACTER} line"
