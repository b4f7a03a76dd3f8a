"""Batches for one learner: its own seeded order of the samples, pass after pass."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from atoll.protocol.errors import ConfigError


class Samples(Protocol):
    """Anything with a length and an index; torch's map-style datasets are."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Gathers(Protocol):
    """A dataset that can fetch a whole batch at once."""

    def gather(self, indices: np.ndarray[Any, Any]) -> torch.Tensor: ...


def generator(seed: int, learner: str, incarnation: int) -> np.random.Generator:
    """Every learner, and every life of it, sees the samples in an order of its own."""
    return np.random.default_rng([seed, zlib.crc32(learner.encode()), incarnation])


def orders(length: int, batch_size: int, random: np.random.Generator, passes: int | None) -> Iterator[Any]:
    """Indices batch by batch; a pass's rest that fills no batch is left out."""
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size} is too small: the least is 1")
    if length < batch_size:
        raise ConfigError(
            f"the dataset has {length} samples, fewer than one batch of {batch_size}: use a smaller batch"
        )
    done = 0
    while passes is None or done < passes:
        order = random.permutation(length)
        for start in range(0, length - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
        done += 1


def collect(dataset: Samples, indices: np.ndarray[Any, Any]) -> Any:
    if isinstance(dataset, torch.Tensor):  # whose own `gather` is something else
        return dataset[torch.from_numpy(indices).to(dataset.device)]
    if isinstance(dataset, Gathers):
        return dataset.gather(indices)
    return torch.utils.data.default_collate([dataset[int(index)] for index in indices])
