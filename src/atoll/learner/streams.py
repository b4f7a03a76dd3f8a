"""Streams: data that is read in its own order and has no length, as Hugging Face's IterableDataset or a loader of the
script's own.

Rules:
- every learner reads a share of its own, and every rank of it a part of that: of Hugging Face's streams whole files
  where they can be dealt out evenly, of others every N-th sample, where the run was begun with N learners. A learner
  beyond these reads the share of another one again; a DataLoader is read as it is;
- a stream that says where it is (state_dict, load_state_dict) goes on behind the last batch that a step was made on, as
  its learner's last snapshot has it. Any other one begins again;
- when a pass ends the next one begins; a stream with set_epoch is told the pass's number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset

from atoll.learner.script import say
from atoll.protocol.errors import ConfigError


def is_stream(data: object) -> TypeGuard[Iterable[Any]]:
    """It is read from its beginning: a loader only where it says how far it is."""
    if isinstance(data, DataLoader):
        return says_position(data)
    if isinstance(data, IterableDataset):
        return True
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return isinstance(data, Iterable) and not indexed and not isinstance(data, Mapping)


def says_position(source: object) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True)
class StreamShare:
    """Which part of a stream is read here."""

    part: int = 0
    parts: int = 1


class DataStream:
    """A share of a stream, read batch by batch, and its position as of the last step.

    Batches may be read ahead of the steps on them: behind each the position is noted, and it counts when the step is
    done."""

    def __init__(self, source: Any, batch_size: int | None, share: StreamShare) -> None:
        """`batch_size` None: what the source gives are batches."""
        self._batch_size, self._share = batch_size, share
        self._source, self._takes_turns = _deal_out(source, share)
        self._says_position = says_position(self._source)
        self._pass = 0
        self._resumed = False
        """The pass begins where an earlier life left it."""
        self._read: deque[dict[str, Any]] = deque()
        """The position behind each batch that was read and not stepped on, the oldest first."""
        self._at: dict[str, Any] = {}
        """The position behind the last step; empty: nobody knows, or there was none."""

    @property
    def is_positioned(self) -> bool:
        return self._says_position

    def read(self, passes: int | None) -> Iterator[Any]:
        """Batches of so many passes, counted over all lives; None: without end. ConfigError: there is no sample."""
        once = isinstance(self._source, Iterator)  # it ends for good
        while passes is None or self._pass < passes:
            empty = True
            for batch in self.read_pass():
                empty = False
                yield batch
            if empty:
                raise ConfigError(
                    f"the stream has no samples for this learner: it reads share {self._share.part} of "
                    f"{self._share.parts}"
                )
            if once:
                return

    def read_pass(self) -> Iterator[Any]:
        """The rest of the pass under way; where nothing is left of it, the next one."""
        self._read.clear()
        resumed, self._resumed = self._resumed, False
        found = False
        for batch in self._read_batches():
            found = True
            yield batch
        self._pass += 1
        if resumed and not found:
            yield from self.read_pass()

    def _read_batches(self) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._pass)
        samples: Iterator[Any] = iter(self._source)
        if self._takes_turns:  # a turn is read whole, so that positions lie between two turns
            samples = (turn[self._share.part] for turn in zip(*[samples] * self._share.parts, strict=False))
        if self._batch_size is None:
            for batch in samples:
                self._note_read()
                yield batch
            return
        while group := list(islice(samples, self._batch_size)):
            self._note_read()
            yield group

    def _note_read(self) -> None:
        state = deepcopy(self._source.state_dict()) if self._says_position else None
        self._read.append({"pass": self._pass, "state": state})

    def stepped(self, batches: int | None) -> None:
        """A step was made on the oldest so many of the batches read; None: on all of them."""
        for _ in range(len(self._read) if batches is None else min(batches, len(self._read))):
            self._at = self._read.popleft()

    # ---- as a snapshot carries it -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Empty: it does not say where it is."""
        if not self._says_position or not self._at:
            return {}
        return {**self._at, "part": self._share.part, "parts": self._share.parts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on there; where that cannot be, begin again and say why."""
        before = StreamShare(state["part"], state["parts"])
        if before != self._share:
            say(
                f"the stream begins again: it was share {before.part} of {before.parts} that this learner read, and is "
                f"{self._share.part} of {self._share.parts} now"
            )
        elif not self._says_position:
            say("the stream begins again: it does not say where it is any more")
        else:
            try:
                self._source.load_state_dict(state["state"])
            except Exception as error:  # of whatever kind: it is the script's own object
                say(f"the stream begins again, as it does not take its position: {type(error).__name__}: {error}")
                return
            self._pass, self._resumed = state["pass"], True
            self._at = {"pass": state["pass"], "state": state["state"]}


def _deal_out(source: Any, share: StreamShare) -> tuple[Any, bool]:
    """What is read, and whether this share's samples have to be picked from it."""
    if share.parts == 1 or isinstance(source, DataLoader):
        return source, False
    if type(source).__module__.partition(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(source, rank=share.part, world_size=share.parts), False
    return source, True


class StreamDataset(IterableDataset[Any]):
    """For a DataLoader of the script's own: the samples of this learner's share, a pass for each loop."""

    def __init__(self, stream: DataStream, watch: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        """`watch` counts what is read; in a loader's worker nobody does, so the position is not known there."""
        self._stream, self._watch = stream, watch

    def __getstate__(self) -> dict[str, Any]:
        return {"_stream": self._stream, "_watch": iter}

    def __iter__(self) -> Iterator[Any]:
        watch = self._watch if torch.utils.data.get_worker_info() is None else iter
        for group in watch(self._stream.read_pass()):
            yield from group
