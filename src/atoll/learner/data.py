"""Batches for one learner: from leases of the run, or, if there are none, in a seeded order of its own.

Drawn here are indices; loading.py makes batches of them. Rules:
- leased samples are taken in the order they were granted, each once;
- a batch holds samples of one dataset; it is short at the end of the data, and before another dataset;
- samples count when their step is done, so a batch that was drawn and never stepped on is drawn again;
- before the first batch a learner waits for its first lease, as for joining itself. Later it never waits: leases come
  ahead of time, and if they do not (the syncer is down), the last one is repeated; its tokens are counted, not leased.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from atoll.learner.script import say
from atoll.learner.streams import DataStream, StreamShare
from atoll.numerics.permutation import permuted
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner.effects import Registered
from atoll.protocol.messages import Range

Indices = np.ndarray[Any, np.dtype[np.int64]]


class MapDataset(Protocol):
    """Anything with a length and an index; torch's map-style datasets are."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Gathers(Protocol):
    """A dataset that can fetch a whole batch at once."""

    def gather(self, indices: np.ndarray[Any, Any]) -> torch.Tensor: ...


Datasets = MapDataset | Mapping[str, MapDataset]


@dataclass(frozen=True, slots=True)
class NamedDataset:
    name: str
    samples: MapDataset
    weight: float


def sources(data: Datasets, weights: Mapping[str, float] | None) -> tuple[NamedDataset, ...]:
    """One dataset, or several by name; weights say how much of each there is in what is trained on."""
    named: Mapping[str, MapDataset] = data if isinstance(data, Mapping) else {"data": data}
    unknown = set(weights or ()) - set(named)
    if unknown:
        raise ConfigError(f"weights name {sorted(unknown)[0]!r}, which is none of the datasets {sorted(named)}")
    found = tuple(NamedDataset(name, one, float((weights or {}).get(name, 1.0))) for name, one in named.items())
    for source in found:
        if not source.weight > 0:
            raise ConfigError(f"the weight of dataset {source.name!r} is {source.weight}: it must be above 0")
        if len(source.samples) == 0:
            raise ConfigError(f"the dataset {source.name!r} has no samples")
    if not found:
        raise ConfigError("no dataset was given")
    return found


class LeasedSamples:
    """What this learner was leased and has made no step on yet.

    Batches may be drawn ahead of the steps on them, as a loader that prefetches does: samples count when their step is
    done, and a batch that was drawn and never stepped on is drawn again.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths, self.batch_size, self._seed = lengths, batch_size, seed
        self.drop_last = False
        """Whether samples that fill no batch are left out, as at the end of a pass."""
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

    def add_leases(self, ranges: Sequence[Range], over: bool) -> None:
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

    def draw_batch(self) -> tuple[int, Indices] | None:
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
        if self.drop_last and len(indices) < self.batch_size:
            self._leave_out(len(indices))
            return self.draw_batch()
        self._drawn.append(len(indices))
        self._ahead += len(indices)
        return dataset, indices

    def _leave_out(self, samples: int) -> None:
        """Count samples that no batch will hold with the batch before them: else the run would wait for their step."""
        self._ahead += samples
        if self._drawn:
            self._drawn[-1] += samples
        else:
            self._drawn.append(samples)
            self.stepped()

    def repeat_batch(self) -> tuple[int, Indices] | None:
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


def collect(dataset: MapDataset, indices: np.ndarray[Any, Any]) -> Any:
    if isinstance(dataset, torch.Tensor):  # whose own `gather` is something else
        return dataset[torch.from_numpy(indices).to(dataset.device)]
    if isinstance(dataset, Gathers):
        return dataset.gather(indices)
    return torch.utils.data.default_collate(fetch(dataset, indices))


def fetch(dataset: MapDataset, indices: np.ndarray[Any, Any]) -> Any:
    """The samples one by one, or all at once where the dataset can: as torch's DataLoader fetches them."""
    many = getattr(dataset, "__getitems__", None)
    if callable(many):
        return many(indices.tolist())
    return [dataset[index] for index in indices.tolist()]


# ---- the feed -------------------------------------------------------------------------------------------------------

Drawn = tuple[int, Indices]
"""The number of a dataset, and the indices of a batch's samples in it."""

TOO_FAR = 64
"""Batches drawn ahead of the steps on them that use leases up: a learner holds two leases or more, of 64 batches."""
NO_STEP = 300
"""Batches drawn without any step that make a forgotten `learner.step` likelier than accumulation or a prefetch."""


class Feed:
    def __init__(self, *, seed: int, name: str) -> None:
        self._seed, self._name = seed, name
        self.registered: Registered | None = None
        """What leases are asked for; None: its data is its own, counted but not leased."""
        self.passed = 0.0
        """Alone: how much of the one pass is done."""
        self._own_batches = self._own_done = 0
        """Alone: batches of the pass, and those whose steps are made."""
        self._leased: LeasedSamples | None = None
        self._stream: DataStream | None = None
        self._saved: dict[str, Any] | None = None
        self._saved_stream: dict[str, Any] = {}
        self.find_earlier: Callable[[], dict[str, Any]] = dict
        """Reads what an earlier life saved of its feed, where all else begins anew."""
        self._used: Callable[[], int] | None = None
        """Of how many of the batches drawn the step just made was; None: of all of them."""
        self._said = False
        self._unstepped: int | None = 0
        """Batches drawn before the first step; None: it was made."""
        self.note_no_step: Callable[[int], None] = lambda batches: None
        """Called once, if so many batches were drawn and no step was made."""

    @property
    def position(self) -> int:
        """Leased samples whose steps are done; −1: nothing is leased."""
        return -1 if self._leased is None else self._leased.position

    @property
    def waiting(self) -> int:
        """Leased batches that were drawn and not stepped on."""
        return 0 if self._leased is None else self._leased.waiting

    def stepped(self) -> None:
        self._unstepped = None
        used = self._used() if self._used is not None else None
        if self._stream is not None:
            self._stream.stepped(used)
        if self._leased is not None:
            self._leased.stepped(used)
        elif self._own_batches:
            self._own_done += 1 if used is None else used
            self.passed = min(1.0, self._own_done / self._own_batches)

    def take_leases(self, ranges: tuple[Range, ...], over: bool, own: str) -> None:
        if own:
            say(f"this learner's data is its own, counted but not leased: {own}")
            self._leased = self.registered = None
        elif self._leased is not None:
            self._leased.add_leases(ranges, over)

    def forget(self) -> None:
        """Another life: what was leased to the one before goes to whoever gets it next."""
        if self._leased is not None:
            self._leased.forget()

    # ---- batches ------------------------------------------------------------------------------------------------

    def open(self, data: Datasets, batch_size: int, weights: Mapping[str, float] | None) -> tuple[NamedDataset, ...]:
        found = sources(data, weights)
        for source in found:
            check_batch(len(source.samples), batch_size)
        return found

    def open_stream(self, source: Any, batch_size: int | None, share: StreamShare) -> DataStream:
        """Its position is kept from now on, and is that of an earlier life to begin with."""
        self._stream = stream = DataStream(source, batch_size, share)
        if not self._saved_stream:
            self.load_stream(self.find_earlier())
        if self._saved_stream:
            stream.load(self._saved_stream)
        self._saved_stream, self.find_earlier = {}, dict
        return stream

    def ask(
        self, found: tuple[NamedDataset, ...], batch_size: int, epochs: int, seed: int, *, drop_last: bool = False
    ) -> Registered:
        """Take leases from now on; what the syncer is to be told. A second loop goes on where the first was left."""
        datasets = tuple((source.name, len(source.samples), source.weight) for source in found)
        before, self.registered = self.registered, Registered(datasets, epochs, batch_size)
        if self._leased is None or before is None or before.datasets != datasets:
            self._leased = LeasedSamples([len(source.samples) for source in found], batch_size, seed)
        self._leased.batch_size, self._leased.drop_last = batch_size, drop_last
        if self._saved is not None:
            self._leased.load(self._saved)
            self._saved = None
        return self.registered

    def count_by(self, used: Callable[[], int]) -> None:
        """A loop begins, in which batches may be drawn ahead of the steps on them: `used` says of how many batches each
        step was. What an earlier loop drew and made no step on is drawn again."""
        self._used = used
        if self._leased is not None:
            self._leased.draw_again()

    def draw_leased(
        self,
        found: tuple[NamedDataset, ...],
        batch_size: int,
        done: Callable[[], bool],
        wait: Callable[[float], None],
        patience_s: float,
    ) -> Iterator[Drawn]:
        self._await_first(done, wait, patience_s)
        while not done() and (leased := self._leased) is not None:
            batch = leased.draw_batch()
            if batch is None and leased.over:
                return
            if batch is None:
                self._say_if_too_far_ahead(leased.waiting)
            batch = batch or leased.repeat_batch()
            if batch is None:
                self._await_first(done, wait, patience_s)
                continue
            self._count_unstepped()
            yield batch
        if not done():
            yield from self.draw_own(found, batch_size, done, incarnation=1, passes=None)

    def _count_unstepped(self) -> None:
        if self._unstepped is not None:
            self._unstepped += 1
            if self._unstepped == NO_STEP:
                self.note_no_step(NO_STEP)

    def _say_if_too_far_ahead(self, batches: int) -> None:
        if batches >= TOO_FAR and not self._said:
            self._said = True
            say(
                f"the loader draws {batches} batches ahead of the steps on them, more than are leased at a time, so "
                "samples come again: use fewer workers or a smaller prefetch_factor"
            )

    def _await_first(self, done: Callable[[], bool], wait: Callable[[float], None], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._leased is not None and self._leased.empty and not self._leased.over and not done():
            left = deadline - time.monotonic()
            if left <= 0:
                say("no data was leased by the syncer: training goes on in an order of its own, counted but not leased")
                self._leased = self.registered = None
                return
            wait(min(left, 0.5))

    def draw_own(
        self,
        found: tuple[NamedDataset, ...],
        batch_size: int,
        done: Callable[[], bool],
        *,
        incarnation: int,
        passes: int | None,
    ) -> Iterator[Drawn]:
        """Every dataset in turn, each in a seeded order of this learner's own."""
        random = generator(self._seed, self._name, incarnation)
        turns = [(dataset, orders(len(one.samples), batch_size, random, passes)) for dataset, one in enumerate(found)]
        self._own_batches = sum(len(source.samples) // batch_size for source in found)
        self._own_done, self.passed = 0, 0.0
        while turns and not done():
            for dataset, turn in list(turns):
                if (indices := next(turn, None)) is None:
                    turns.remove((dataset, turn))
                elif not done():
                    yield dataset, indices

    # ---- as a cut carries it ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        leases = {} if self._leased is None else self._leased.state()
        at = {} if self._stream is None else self._stream.state()
        return {**leases, "stream": at} if at else leases

    def load(self, state: dict[str, Any]) -> None:
        """Taken up when the batches are asked for."""
        self.load_stream(state)
        self._saved = {name: value for name, value in state.items() if name != "stream"} or None

    def load_stream(self, state: dict[str, Any]) -> None:
        """The position of the stream alone: leases of an earlier life go to whoever gets them next."""
        self._saved_stream = state.get("stream", {})
