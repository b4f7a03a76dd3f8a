"""Batches through torch's DataLoader: workers, prefetching, pinned memory, collate functions.

A loader draws batches ahead of the steps on them, and a sample counts as taken when its step is done. Where the loader
is ours (`learner.batches`) every batch that leaves it is counted. Where it is the script's (`learner.sampler`) only its
draws are seen: torch's DataLoader draws what it prefetches as a loop begins, and then one batch whenever it hands one
over, so draws between two steps are batches handed over between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from atoll.learner.data import Drawn, MapDataset, NamedDataset, collect, fetch

OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""Of DataLoader's, those that leave the order alone."""
ORDER = ("shuffle", "sampler", "batch_sampler", "in_order")


class LeasedSampler(Sampler[list[int]]):
    """For `DataLoader(dataset, batch_sampler=...)`: the indices of each batch that the run leases to this learner."""

    def __init__(self, begin: Callable[[int], Iterator[Drawn]]) -> None:
        """`begin` gives the draws of a loop, by its number."""
        self._begin = begin
        self._loops = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._loops += 1
        draws = self._begin(self._loops)
        return (indices.tolist() for _, indices in draws)


class DrawCounter:
    """Of how many batches each step was, where only the draws of a loader are seen.

    The first step was on as many as the next one that drew; until that one at least on one. When the data has ended
    nothing is drawn any more, and steps are on as many batches as before.
    """

    def __init__(self, draws: Iterator[Any]) -> None:
        self._draws = draws
        self._drawn = self._seen = self._used = 0
        """Batches drawn, drawn by the last step, and trained on."""
        self._begun_with = 0
        """Drawn by the first step."""
        self._ahead: int | None = None
        """So many are drawn and wait for their turn, once that is known."""
        self._usual = 1
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        for drawn in self._draws:
            self._drawn += 1
            yield drawn
        self._over = True

    def count_step(self) -> int:
        """A step was made: on how many batches more than were known before."""
        new, first = self._drawn - self._seen, self._seen == 0
        self._seen = self._drawn
        if first:
            self._begun_with = new
        elif not self._over:
            if new == 0:
                return 0  # the same batch once more
            self._usual = new
            self._ahead = max(0, self._begun_with - new) if self._ahead is None else self._ahead
        before = self._used
        used = before + self._usual if self._ahead is None or self._over else self._drawn - self._ahead
        self._used = max(before, min(self._drawn, used))
        return self._used - before


class UsedBatches:
    """Batches that left a loader of ours since the last step."""

    def __init__(self) -> None:
        self._since = 0

    def count(self) -> None:
        self._since += 1

    def count_step(self) -> int:
        since, self._since = self._since, 0
        return since


class DrawnBatches(Dataset[Any]):
    """What a loader's workers fetch from: a batch as it was drawn, collected at once or sample by sample."""

    def __init__(self, found: tuple[NamedDataset, ...], whole: bool) -> None:
        self._samples: list[MapDataset] = [source.samples for source in found]
        self._whole = whole

    def __getitems__(self, drawn: Any) -> Any:
        dataset, indices = drawn
        return (collect if self._whole else fetch)(self._samples[dataset], indices)

    def __getitem__(self, index: Any) -> Any:  # a loader that is given batches never asks for one
        return self.__getitems__(index)


def load(
    found: tuple[NamedDataset, ...], draws: Iterator[Drawn], options: Mapping[str, Any], seed: int
) -> DataLoader[Any]:
    """A loader of what is drawn. Its workers' chance is this learner's own unless `options` name a generator."""
    whole = options.get("collate_fn") is None
    given = {"generator": torch.Generator().manual_seed(seed), **options}
    if whole:
        given["collate_fn"] = _as_it_is
    return DataLoader(DrawnBatches(found, whole), batch_sampler=draws, **given)  # type: ignore[arg-type]


def check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in ORDER:
            raise TypeError(
                f"learner.batches takes no {name}: the run says which samples come in which order, shuffled and each "
                "once in a pass; leave it out"
            )
        if name not in OPTIONS:
            raise TypeError(f"learner.batches takes no {name!r}; of DataLoader's options it takes {', '.join(OPTIONS)}")


def check_stream(batch_size: int | None, weights: object, options: Mapping[str, Any], *, is_loader: bool) -> None:
    """TypeError says what a stream cannot be read with."""
    if weights is not None:
        raise TypeError("learner.batches takes weights with datasets that have a length: mix the streams yourself")
    if is_loader and batch_size is not None:
        raise TypeError("learner.batches takes no batch_size with a loader, which makes the batches: leave it out")
    for name in options:
        if is_loader or name != "collate_fn":
            raise TypeError(
                f"learner.batches takes no {name} with a stream, which is read in this process: make a loader with its "
                "options yourself, of torchdata's StatefulDataLoader, and hand that over"
            )


def check_dataset(data: object, call: str) -> None:
    """TypeError says in one line what to hand over instead of a loader or a stream."""
    if isinstance(data, Mapping):
        for one in data.values():
            check_dataset(one, call)
    elif isinstance(data, DataLoader):
        raise TypeError(
            f"learner.{call} takes a dataset, not a DataLoader: hand over loader.dataset with batch_size and, for "
            "learner.batches, num_workers, collate_fn and so on; or make the DataLoader with "
            "batch_sampler=learner.sampler(dataset, batch_size); of a stream, DataLoader(learner.stream(dataset, 8), 8)"
        )
    elif isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(
            f"learner.{call} takes a dataset with a length and an index, which a {type(data).__name__} has not: make a "
            "list of it; learner.batches and learner.stream take what can only be iterated"
        )


def checked_batch_size(batch_size: int | None, call: str) -> int:
    """The signature lets it be missing, so that whoever hands over a DataLoader is told about that first."""
    if batch_size is None:
        raise TypeError(f"learner.{call} needs a batch size: learner.{call}(dataset, batch_size=8)")
    return batch_size


def seed_of(seed: int, name: str, incarnation: int) -> int:
    """Return the seed of a learner's life, of 32 bits, as numpy wants."""
    words = np.random.SeedSequence([seed & (2**64 - 1), *name.encode()], spawn_key=(incarnation,))
    return int(words.generate_state(1)[0])


def _as_it_is(batch: Any) -> Any:
    return batch
