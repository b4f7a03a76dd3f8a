"""Batches for one learner: from the leases of the run, or, where there are none, in a seeded order of its own.

Rules kept here: leased samples are taken in the order they were granted, each once; a batch holds samples of one
dataset, and a short one ends the data or goes before another dataset; samples count as taken when their step is done.
When leases run out because the syncer is out of reach, the last one is gone through again: training does not stop, and
those tokens are counted but not leased.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from atoll.numerics.permutation import permuted
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Range

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Samples(Protocol):
    """Anything with a length and an index; torch's map-style datasets are."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Gathers(Protocol):
    """A dataset that can fetch a whole batch at once."""

    def gather(self, indices: np.ndarray[Any, Any]) -> torch.Tensor: ...


Datasets = Samples | Mapping[str, Samples]


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    samples: Samples
    weight: float


def sources(data: Datasets, weights: Mapping[str, float] | None) -> tuple[Source, ...]:
    """One dataset, or several by name; weights say how much of each there is in what is trained on."""
    named: Mapping[str, Samples] = data if isinstance(data, Mapping) else {"data": data}
    unknown = set(weights or ()) - set(named)
    if unknown:
        raise ConfigError(f"weights name {sorted(unknown)[0]!r}, which is none of the datasets {sorted(named)}")
    found = tuple(Source(name, one, float((weights or {}).get(name, 1.0))) for name, one in named.items())
    for source in found:
        if not source.weight > 0:
            raise ConfigError(f"the weight of dataset {source.name!r} is {source.weight}: it must be above 0")
        if len(source.samples) == 0:
            raise ConfigError(f"the dataset {source.name!r} has no samples")
    if not found:
        raise ConfigError("no dataset was given")
    return found


class Leased:
    """What this learner was leased and has made no step on yet.

    Batches may be drawn ahead of the steps on them, as a loader that prefetches does: samples count when their step is
    done, and a batch that was drawn and never stepped on is drawn again.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths, self.batch_size, self._seed = lengths, batch_size, seed
        self._ranges: deque[Range] = deque()
        self._newest = -1
        self._at = 0
        """Samples of the first range whose steps are done."""
        self._drawn: deque[int] = deque()
        """How many leased samples each batch holds that was drawn and not stepped on; the oldest first."""
        self._ahead = 0
        """All of those samples."""
        self._last: Range | None = None
        self._again = 0
        self._permuted: dict[Range, Indices] = {}
        """The indices of all samples of a range: batch by batch they would take far longer."""
        self.position = 0
        """Samples whose steps are done."""
        self.over = False

    def supply(self, ranges: Sequence[Range], over: bool) -> None:
        for one in ranges:
            if one.lease > self._newest:
                self._newest = one.lease
                self._ranges.append(one)
        self.over = self.over or over

    def forget(self) -> None:
        """Another life: what it was leased goes to whoever gets it next. Batches that are drawn already count for
        nothing."""
        self._ranges.clear()
        self._drawn = deque(0 for _ in self._drawn)
        self._newest = -1
        self._at = self._ahead = self.position = 0
        self.over = False

    def stepped(self, batches: int | None = None) -> None:
        """A step was made on the oldest so many of the batches drawn; None: on all of them."""
        for _ in range(len(self._drawn) if batches is None else min(batches, len(self._drawn))):
            samples = self._drawn.popleft()
            self._ahead -= samples
            self._at += samples
            self.position += samples
        while self._ranges and self._at >= _length(self._ranges[0]):
            self._at -= _length(self._ranges.popleft())

    def draw_again(self) -> None:
        """Nobody will step on what was drawn: the next draw begins with it."""
        self._drawn.clear()
        self._ahead = 0

    @property
    def waiting(self) -> int:
        """Batches that were drawn and not stepped on."""
        return len(self._drawn)

    @property
    def empty(self) -> bool:
        """There is nothing left to draw."""
        return self._at + self._ahead >= sum(map(_length, self._ranges))

    def take(self) -> tuple[int, Indices] | None:
        """The next batch: its dataset and the indices of its samples. None when there is none."""
        behind, wanted, parts = self._at + self._ahead, self.batch_size, []
        dataset = -1
        for one in self._ranges:
            start, behind = one.start + behind, max(0, behind - _length(one))
            if start >= one.stop:
                continue
            if not wanted or dataset not in (-1, one.dataset):
                break
            first = start - one.start
            parts.append(self._indices(one)[first : first + wanted])
            dataset, wanted, self._last = one.dataset, wanted - len(parts[-1]), one
        if not parts:
            return None
        indices = np.concatenate(parts)
        self._drawn.append(len(indices))
        self._ahead += len(indices)
        return dataset, indices

    def repeat(self) -> tuple[int, Indices] | None:
        """A batch of the last lease once more: counted, not leased."""
        last = self._last
        if last is None:
            return None
        places = (self._again + np.arange(self.batch_size, dtype=np.int64)) % _length(last)
        self._again += self.batch_size
        self._drawn.append(0)
        return last.dataset, self._indices(last)[places]

    def state(self) -> dict[str, Any]:
        """As a cut carries it. A batch that was drawn and not stepped on is drawn again."""
        ranges = [msgspec.to_builtins(one) for one in self._ranges]
        at = {"at": self._at, "newest": self._newest, "position": self.position, "over": self.over}
        return {"ranges": ranges, **at}

    def load(self, state: dict[str, Any]) -> None:
        self._ranges = deque(msgspec.convert(one, Range) for one in state["ranges"])
        self.draw_again()
        self._at, self._newest = state["at"], state["newest"]
        self.position, self.over = state["position"], state["over"]

    def _indices(self, one: Range) -> Indices:
        if one not in self._permuted:
            self._permuted = {held: self._permuted[held] for held in self._ranges if held in self._permuted}
            positions, length = np.arange(one.start, one.stop, dtype=np.int64), self._lengths[one.dataset]
            indices = permuted(positions, length=length, seed=self._seed, dataset=one.dataset, epoch=one.epoch)
            self._permuted[one] = indices
        return self._permuted[one]


def _length(range_: Range) -> int:
    return range_.stop - range_.start


def generator(seed: int, learner: str, incarnation: int) -> np.random.Generator:
    """Every learner, and every life of it, sees the samples in an order of its own."""
    return np.random.default_rng([seed, zlib.crc32(learner.encode()), incarnation])


def orders(length: int, batch_size: int, random: np.random.Generator, passes: int | None) -> Iterator[Any]:
    """Indices batch by batch; a pass's rest that fills no batch is left out."""
    check_batch(length, batch_size)
    done = 0
    while passes is None or done < passes:
        order = random.permutation(length)
        for start in range(0, length - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
        done += 1


def check_batch(length: int, batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size} is too small: the least is 1")
    if length < batch_size:
        raise ConfigError(
            f"the dataset has {length} samples, fewer than one batch of {batch_size}: use a smaller batch"
        )


def collect(dataset: Samples, indices: np.ndarray[Any, Any]) -> Any:
    if isinstance(dataset, torch.Tensor):  # whose own `gather` is something else
        return dataset[torch.from_numpy(indices).to(dataset.device)]
    if isinstance(dataset, Gathers):
        return dataset.gather(indices)
    return torch.utils.data.default_collate(fetch(dataset, indices))


def fetch(dataset: Samples, indices: np.ndarray[Any, Any]) -> Any:
    """The samples one by one, or all at once where the dataset can: as torch's DataLoader fetches them."""
    many = getattr(dataset, "__getitems__", None)
    if callable(many):
        return many(indices.tolist())
    return [dataset[index] for index in indices.tolist()]
