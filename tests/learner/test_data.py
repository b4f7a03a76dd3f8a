from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from atoll.learner.data import collect, generator, orders
from atoll.protocol.errors import ConfigError


def drawn(seed: int = 0, learner: str = "learner-0", incarnation: int = 1) -> list[list[int]]:
    return [batch.tolist() for batch in orders(20, 4, generator(seed, learner, incarnation), passes=2)]


def test_an_order_repeats_with_its_seed_learner_and_incarnation_and_only_then() -> None:
    assert drawn() == drawn()
    others = [drawn(seed=1), drawn(learner="learner-1"), drawn(incarnation=2)]
    assert all(other != drawn() for other in others)
    assert others[0] != others[1] != others[2]


@given(length=st.integers(1, 50), batch=st.integers(1, 50), passes=st.integers(1, 3))
def test_a_pass_takes_every_sample_once_but_for_the_rest(length: int, batch: int, passes: int) -> None:
    if batch > length:
        return
    batches = list(orders(length, batch, generator(0, "learner-0", 1), passes=passes))
    each = length // batch
    assert len(batches) == each * passes
    for start in range(0, len(batches), each):
        seen = np.concatenate(batches[start : start + each])
        assert len(set(seen.tolist())) == each * batch <= length


def test_without_an_end_passes_follow_each_other_in_another_order() -> None:
    batches = [batch.tolist() for batch in islice(orders(8, 8, generator(0, "learner-0", 1), passes=None), 3)]
    assert all(sorted(batch) == list(range(8)) for batch in batches)
    assert batches[0] != batches[1] != batches[2]


def test_a_dataset_smaller_than_a_batch_is_refused_before_the_first_one() -> None:
    with pytest.raises(ConfigError, match="3 samples, fewer than one batch of 4: use a smaller batch"):
        next(orders(3, 4, generator(0, "learner-0", 1), passes=1))
    with pytest.raises(ConfigError, match="batch_size = 0"):
        next(orders(3, 0, generator(0, "learner-0", 1), passes=1))


INDICES = np.array([2, 0])


def test_a_dataset_that_gathers_is_asked_once() -> None:
    class Windows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("one by one")

        def gather(self, indices: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(indices * 10)

    assert collect(Windows(), INDICES).tolist() == [20, 0]


def test_a_tensor_gives_its_rows() -> None:
    rows = torch.arange(6).view(3, 2)
    assert collect(rows, INDICES).tolist() == [[4, 5], [0, 1]]


def test_a_numpy_array_gives_its_rows() -> None:
    assert collect(np.arange(6).reshape(3, 2), INDICES).tolist() == [[4, 5], [0, 1]]


def test_torch_datasets_are_collated_as_a_loader_would() -> None:
    inputs, labels = collect(TensorDataset(torch.arange(6).view(3, 2), torch.tensor([7, 8, 9])), INDICES)
    assert inputs.tolist() == [[4, 5], [0, 1]] and labels.tolist() == [9, 7]


def test_samples_that_are_dictionaries_become_one() -> None:
    samples = [{"x": torch.tensor(n), "y": n} for n in range(3)]
    batch = collect(samples, INDICES)
    assert batch["x"].tolist() == batch["y"].tolist() == [2, 0]
