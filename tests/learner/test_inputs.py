"""A number made of what a model is trained on."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from tests.learner.test_learner import Joined, small
from torch import nn

from atoll.learner.step_stats import EVERY, InputDigest
from atoll.mailbox.channel import StepReport
from atoll.protocol.limits import MAX_COUNTER


class Anything(nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        return self.weight.sum()


def number(*given: Any, **named: Any) -> int:
    model = Anything()
    inputs = InputDigest(model, wanted=lambda: True)
    model(*given, **named)
    return inputs.number


BATCH = torch.arange(12.0).view(3, 4)


def test_equal_batches_have_equal_numbers_and_others_have_others() -> None:
    assert 0 <= number(BATCH) == number(BATCH.clone()) < MAX_COUNTER
    others = [BATCH + 1, BATCH.double(), BATCH[:2], BATCH.int(), torch.zeros(3, 4)]
    assert len({number(BATCH), *map(number, others)}) == 1 + len(others)


def test_it_is_made_of_all_that_the_model_is_given_in_lists_dicts_and_by_name() -> None:
    mask = torch.ones(3, 4)
    ways = [
        (lambda x: number(mask, x)),
        (lambda x: number(mask=mask, x=x)),
        (lambda x: number({"mask": mask, "x": [x]})),
        (lambda x: number([[(mask, x)]])),
    ]
    for way in ways:
        assert way(BATCH) == way(BATCH.clone()) != way(BATCH + 1)


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.randn(50, 40).t(),
        torch.randn(9).expand(5, 9),
        torch.tensor(3.0),
        torch.randn(300).to(torch.bfloat16),
        torch.tensor([True, False]),
    ],
)
def test_any_layout_and_type_will_do(batch: torch.Tensor) -> None:
    assert number(batch) == number(batch.detach()) >= 0


def test_without_tensors_there_is_no_number() -> None:
    assert number("text", 3, x=None) == number() == number(torch.zeros(0)) == -1


def test_every_so_many_steps_it_looks_once() -> None:
    model = Anything()
    inputs = InputDigest(model, wanted=lambda: True)
    seen = []
    for t in range(1, 2 * EVERY + 2):
        model(torch.tensor([float(t)]))
        model(torch.tensor([float(-t)]))  # another call of the same step
        inputs.stepped(t)
        seen.append(inputs.number)
    first, second, third = (number(torch.tensor([float(t)])) for t in (1, EVERY + 1, 2 * EVERY + 1))
    assert seen == [first] * EVERY + [second] * EVERY + [third]


def test_scoring_is_not_looked_at_nor_leased_data() -> None:
    model, own = Anything(), False
    inputs = InputDigest(model, wanted=lambda: own)
    with torch.no_grad():
        model(BATCH)
    model.eval()
    model(BATCH)
    model.train()
    model(BATCH)
    assert inputs.number == -1
    own = True
    inputs.stepped(EVERY)
    model(BATCH)
    assert inputs.number == number(BATCH)


def test_a_copy_of_the_model_and_a_file_of_it_are_free_of_it() -> None:
    model = nn.Linear(4, 1)
    inputs = InputDigest(model, wanted=lambda: True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(BATCH)
    assert inputs.number == -1
    inputs.close()
    model(BATCH)
    assert inputs.number == -1


def test_a_compiled_model_is_looked_at_from_outside_and_never_breaks_its_graph() -> None:
    model = nn.Linear(4, 1)
    inside = InputDigest(model, wanted=lambda: True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    outside = InputDigest(compiled, wanted=lambda: True)
    compiled(BATCH)
    assert inside.number == -1 and outside.number == number(BATCH)


def test_a_scripted_model_which_takes_no_hooks_is_let_be() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Linear(4, 1))
    inputs = InputDigest(model, wanted=lambda: True)
    model(BATCH)
    assert inputs.number == -1
    inputs.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_number_comes_later_and_is_the_same() -> None:
    model = Anything().cuda()
    inputs = InputDigest(model, wanted=lambda: True)
    model(BATCH.cuda())
    torch.cuda.synchronize()
    assert inputs.number == number(BATCH)


def test_it_goes_along_with_the_reports_of_a_learner_whose_data_is_its_own() -> None:
    run = Joined(small(), join_wait_s=5.0)
    with run.learner as learner:
        for _ in range(EVERY + 1):
            learner.model(torch.full((1, 2), float(learner.steps)))
            learner.step(tokens=1)
        said = [frame.stepped.inputs for frame in run.courier.of(StepReport)]  # type: ignore[attr-defined]
    assert said == [number(torch.zeros(1, 2))] * EVERY + [number(torch.full((1, 2), float(EVERY)))]
    assert not learner.model._forward_pre_hooks, "the model is as it was"
