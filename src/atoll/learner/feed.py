"""Where a learner's batches come from: leases of the run, or an order of its own.

Before the first batch it waits for its first lease, as joining itself is waited for; later it never waits: leases come
ahead of time, and when they do not (the syncer is away), the last one is gone through again. What is drawn here are
indices; loading.py makes batches of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atoll.learner.data import Datasets, Indices, Leased, Source, check_batch, generator, orders, sources
from atoll.learner.ending import say
from atoll.protocol.effects import Registered
from atoll.protocol.messages import Range

Drawn = tuple[int, Indices]
"""The number of a dataset, and the indices of a batch's samples in it."""

TOO_FAR = 64
"""Batches drawn ahead of the steps on them that use leases up: a learner holds two leases or more, of 64 batches."""


class Feed:
    def __init__(self, *, seed: int, name: str) -> None:
        self._seed, self._name = seed, name
        self.registered: Registered | None = None
        """What leases are asked for; None: its data is its own, counted but not leased."""
        self.passed = 0.0
        """Alone: how much of the one pass is done."""
        self._leased: Leased | None = None
        self._saved: dict[str, Any] | None = None
        self._used: Callable[[], int] | None = None
        """Of how many of the batches drawn the step just made was; None: of all of them."""
        self._said = False

    @property
    def position(self) -> int:
        """Leased samples whose steps are done; −1: nothing is leased."""
        return -1 if self._leased is None else self._leased.position

    def stepped(self) -> None:
        used = self._used() if self._used is not None else None
        if self._leased is not None:
            self._leased.stepped(used)

    def supplied(self, ranges: tuple[Range, ...], over: bool, own: str) -> None:
        if own:
            say(f"this learner's data is its own, counted but not leased: {own}")
            self._leased = self.registered = None
        elif self._leased is not None:
            self._leased.supply(ranges, over)

    def forget(self) -> None:
        """Another life: what was leased to the one before goes to whoever gets it next."""
        if self._leased is not None:
            self._leased.forget()

    # ---- batches ------------------------------------------------------------------------------------------------

    def open(self, data: Datasets, batch_size: int, weights: Mapping[str, float] | None) -> tuple[Source, ...]:
        found = sources(data, weights)
        for source in found:
            check_batch(len(source.samples), batch_size)
        return found

    def ask(self, found: tuple[Source, ...], batch_size: int, epochs: int, seed: int) -> Registered:
        """Take leases from now on; what the syncer is to be told. A second loop goes on where the first was left."""
        datasets = tuple((source.name, len(source.samples), source.weight) for source in found)
        before, self.registered = self.registered, Registered(datasets, epochs, batch_size)
        if self._leased is None or before is None or before.datasets != datasets:
            self._leased = Leased([len(source.samples) for source in found], batch_size, seed)
        self._leased.batch_size = batch_size
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
        found: tuple[Source, ...],
        batch_size: int,
        done: Callable[[], bool],
        wait: Callable[[float], None],
        patience_s: float,
    ) -> Iterator[Drawn]:
        self._await_first(done, wait, patience_s)
        while not done() and (leased := self._leased) is not None:
            batch = leased.take()
            if batch is None and leased.over:
                return
            if batch is None:
                self._say_if_too_far_ahead(leased.waiting)
            batch = batch or leased.repeat()
            if batch is None:
                self._await_first(done, wait, patience_s)
                continue
            yield batch
        if not done():
            yield from self.draw_own(found, batch_size, done, incarnation=1, passes=None)

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
        found: tuple[Source, ...],
        batch_size: int,
        done: Callable[[], bool],
        *,
        incarnation: int,
        passes: int | None,
    ) -> Iterator[Drawn]:
        """Every dataset in turn, each in a seeded order of this learner's own."""
        random = generator(self._seed, self._name, incarnation)
        turns = [(dataset, orders(len(one.samples), batch_size, random, passes)) for dataset, one in enumerate(found)]
        whole = sum(len(source.samples) // batch_size for source in found)
        number = 0
        while turns and not done():
            for dataset, turn in list(turns):
                if (indices := next(turn, None)) is None:
                    turns.remove((dataset, turn))
                elif not done():
                    self.passed = number / whole
                    number += 1
                    yield dataset, indices

    # ---- as a cut carries it ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {} if self._leased is None else self._leased.state()

    def load(self, state: dict[str, Any]) -> None:
        """Taken up when the batches are asked for."""
        self._saved = state or None
