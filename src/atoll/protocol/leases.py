"""Who trains on which samples: leases of ranges of the data, cut from passes over seeded permutations.

A lease is a range of positions of one pass (epoch) over one dataset; numerics/permutation.py says which samples they
are. A learner takes samples from its leases in the order granted; its *position* is how many it has taken in this
incarnation. Rules kept here, each with its test:
- a position is issued once per pass, and again only after it came back;
- what comes back is the end of what an incarnation held, from the position on that no merged contribution reaches
  (`merged_to`): a sample is issued again only if no fragment has merged it;
- what came back is issued first, oldest first; then the pass goes on. A lease never reaches over the end of a pass;
- of several datasets the next is the one with the least issued for its weight (the first of equals), so samples follow
  the weights to within a lease. Each is passed over `epochs` times; one that is used up leaves the field to the others.

The state follows from the records Granted, Merged and Gone alone, in their order: nothing but `granted`, `merged` and
`gone` changes it. How far a learner has read (`taken`) is no part of it: after a restart its next report tells.
It does not grow with the run: a cursor per dataset, what came back, and per incarnation the leases not merged yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import msgspec
from msgspec.structs import replace

from atoll.protocol.errors import ConfigError
from atoll.protocol.records import GrantedRecord, MergedRecord, Record


class DatasetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    samples: int
    weight: float = 1.0
    """Its share of the samples issued, against the other datasets' weights."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"dataset {self.name!r} has {self.samples} samples: leave it out, or give it some")
        if not (self.weight > 0 and isfinite(self.weight)):
            raise ConfigError(f"dataset {self.name!r} has weight {self.weight}: give it one above 0, or leave it out")


class DataPiece(Record, frozen=True):
    """Positions [start, stop) of one pass over one dataset."""

    dataset: int
    epoch: int
    start: int
    stop: int


class Cursor(Record, frozen=True):
    """Where the pass under way over a dataset goes on."""

    epoch: int = 0
    start: int = 0


class Holding(Record, frozen=True):
    """What one incarnation was leased, less the leases that lie wholly below `merged_to`."""

    learner: str
    incarnation: int
    first: int
    """The position at which the first of these leases begins."""
    merged_to: int
    """The highest position of a merged contribution: what lies below it is in the model."""
    leases: tuple[GrantedRecord, ...]

    @property
    def end(self) -> int:
        return self.first + sum(lease.stop - lease.start for lease in self.leases)

    def merged(self, position: int) -> Holding:
        """Contributions reach this far: leases that lie below it can be forgotten."""
        first, kept = self.first, list(self.leases)
        while kept and first + kept[0].stop - kept[0].start <= position:
            first += kept[0].stop - kept[0].start
            del kept[0]
        return replace(self, first=first, merged_to=max(self.merged_to, position), leases=tuple(kept))

    def since(self, position: int) -> list[DataPiece]:
        """What it holds from this position on, one piece where leases follow each other in their pass."""
        pieces: list[DataPiece] = []
        at = self.first
        for lease in self.leases:
            start = lease.start + max(0, position - at)
            at += lease.stop - lease.start
            if start < lease.stop:
                _append(pieces, DataPiece(lease.dataset, lease.epoch, start, lease.stop))
        return pieces


class LeasesState(Record, frozen=True):
    """All of it, as a cut carries it."""

    datasets: tuple[DatasetSpec, ...]
    epochs: int
    leases: int
    """Granted so far."""
    cursors: tuple[Cursor, ...]
    waiting: tuple[DataPiece, ...]
    holdings: tuple[Holding, ...]


class Leases:
    def __init__(self, datasets: Sequence[DatasetSpec], epochs: int = 0) -> None:
        """`epochs`: passes over each dataset; 0: no end."""
        if not datasets or epochs < 0:
            raise ConfigError(
                f"{len(datasets)} datasets, {epochs} epochs: leases need a dataset, and epochs of 0 or more"
            )
        self.datasets, self.epochs = tuple(datasets), epochs
        self._count = 0
        self._cursors = [Cursor() for _ in datasets]
        self._waiting: list[DataPiece] = []
        """Came back, to be issued again; the oldest first."""
        self._holdings: dict[tuple[str, int], Holding] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._ends: dict[tuple[str, int], int] = {}
        """Per holding, how many samples were leased to it in all."""

    # ---- issuing ------------------------------------------------------------------------------------------------

    def next(self, learner: str, incarnation: int, count: int) -> GrantedRecord | None:
        """The lease of at most `count` samples it would get now; None when nothing is left. `granted` makes it so."""
        assert count > 0
        piece = self._waiting[0] if self._waiting else self._fresh()
        if piece is None:
            return None
        stop = min(piece.stop, piece.start + count)
        return GrantedRecord(self._count, piece.dataset, piece.epoch, piece.start, stop, learner, incarnation)

    @property
    def used_up(self) -> bool:
        """Nothing is left to issue; what is held may still come back."""
        return not self._waiting and self._fresh() is None

    def granted(self, lease: GrantedRecord) -> None:
        piece = self._waiting[0] if self._waiting else self._fresh()
        assert piece is not None and self._count == lease.lease, "leases are numbered in the order they are granted"
        at = (piece.dataset, piece.epoch, piece.start)
        assert (lease.dataset, lease.epoch, lease.start) == at and lease.start < lease.stop <= piece.stop, (
            "not the next"
        )
        self._count += 1
        rest = [replace(piece, start=lease.stop)] if lease.stop < piece.stop else []
        if self._waiting:
            self._waiting[:1] = rest
        else:
            self._cursors[piece.dataset] = Cursor(piece.epoch, lease.stop) if rest else Cursor(piece.epoch + 1)
        key = (lease.learner, lease.incarnation)
        held = self._holdings.get(key) or Holding(*key, first=0, merged_to=0, leases=())
        self._holdings[key] = replace(held, leases=(*held.leases, lease))
        self._ends[key] = self._ends.get(key, 0) + lease.stop - lease.start

    def _fresh(self) -> DataPiece | None:
        """What is left of the pass under way over the dataset whose turn it is."""
        open_ = [n for n, cursor in enumerate(self._cursors) if not self.epochs or cursor.epoch < self.epochs]
        if not open_:
            return None
        dataset = min(open_, key=lambda n: self.issued(n) / self.datasets[n].weight)
        cursor = self._cursors[dataset]
        return DataPiece(dataset, cursor.epoch, cursor.start, self.datasets[dataset].samples)

    def issued(self, dataset: int) -> int:
        """Samples of a dataset that were issued at least once, over all its passes."""
        cursor = self._cursors[dataset]
        return cursor.epoch * self.datasets[dataset].samples + cursor.start

    # ---- what becomes of a lease --------------------------------------------------------------------------------

    def taken(self, learner: str, incarnation: int, position: int) -> str | None:
        """It has taken this many samples, as it says; what is wrong with that, if anything is."""
        held = self._holdings.get((learner, incarnation))
        leased = self._ends.get((learner, incarnation), 0)
        if position > leased:
            return f"{learner} (incarnation {incarnation}) says it took {position} samples, {leased} were leased to it"
        if held is not None:
            self._taken[learner, incarnation] = max(position, self._taken.get((learner, incarnation), 0))
        return None

    def merged(self, record: MergedRecord) -> None:
        """Members that hold no leases (any more) are passed over."""
        for share in record.members:
            key = (share.learner, share.incarnation)
            if (held := self._holdings.get(key)) is not None:
                self._holdings[key] = held.merged(min(share.position, held.end))

    def gone(self, learner: str, incarnation: int, again_from: int = -1) -> None:
        """It is over: what it holds from `again_from` on comes back, but nothing that is merged.

        A round under way may hold a contribution of it: its position counts for `again_from` as if it were merged.
        """
        held = self._holdings.pop((learner, incarnation), None)
        self._taken.pop((learner, incarnation), None)
        self._ends.pop((learner, incarnation), None)
        if held is not None:
            for piece in held.since(max(again_from, held.merged_to)):
                _append(self._waiting, piece)

    # ---- what is known ------------------------------------------------------------------------------------------

    def holds(self, learner: str, incarnation: int) -> bool:
        """Whether it was ever granted a lease and is not gone."""
        return (learner, incarnation) in self._holdings

    def held(self, learner: str, incarnation: int) -> tuple[GrantedRecord, ...]:
        """Its leases that it has not taken to the end, as far as is known, in order."""
        held = self._holdings.get((learner, incarnation))
        return held.merged(self._position(held)).leases if held is not None else ()

    def room(self, learner: str, incarnation: int) -> int:
        """Leased samples that it has not taken yet, as far as is known."""
        held = self._holdings.get((learner, incarnation))
        return self._ends[learner, incarnation] - self._position(held) if held is not None else 0

    def leased(self, learner: str, incarnation: int) -> int:
        """All samples that were leased to it so far."""
        return self._ends.get((learner, incarnation), 0)

    def merged_to(self, learner: str, incarnation: int) -> int:
        """The highest position of its merged contributions."""
        held = self._holdings.get((learner, incarnation))
        return held.merged_to if held is not None else 0

    def _position(self, held: Holding) -> int:
        return max(held.merged_to, self._taken.get((held.learner, held.incarnation), 0))

    def differs(self, datasets: Sequence[tuple[str, int, float]], epochs: int) -> str | None:
        """The first difference between this data and the run's, as one line; None when equal."""
        ours = [(one.name, one.samples, one.weight) for one in self.datasets]
        for mine, theirs in zip(ours, datasets, strict=False):
            if mine != theirs:
                return f"dataset {theirs[0]!r} is {_words(theirs)} here, {mine[0]!r} is {_words(mine)} in the run"
        if len(ours) != len(datasets):
            return f"{len(datasets)} datasets here, {len(ours)} in the run"
        return f"{epochs} epochs here, {self.epochs} in the run" if epochs != self.epochs else None

    # ---- as a cut carries it ------------------------------------------------------------------------------------

    def state(self) -> LeasesState:
        holdings = tuple(self._holdings[key] for key in sorted(self._holdings))
        cursors, waiting = tuple(self._cursors), tuple(self._waiting)
        return LeasesState(self.datasets, self.epochs, self._count, cursors, waiting, holdings)

    @classmethod
    def restore(cls, state: LeasesState) -> Leases:
        leases = cls(state.datasets, state.epochs)
        leases._count, leases._cursors, leases._waiting = state.leases, list(state.cursors), list(state.waiting)
        leases._holdings = {(held.learner, held.incarnation): held for held in state.holdings}
        leases._ends = {key: held.end for key, held in leases._holdings.items()}
        return leases


def wrong_sources(datasets: Iterable[tuple[str, int, float]], epochs: int) -> str | None:
    """Why leases cannot be cut from this data, as a learner describes it."""
    try:
        Leases([DatasetSpec(*dataset) for dataset in datasets], epochs)
    except ConfigError as error:
        return str(error)
    return None


def _append(pieces: list[DataPiece], piece: DataPiece) -> None:
    """At the end; as one with the last where it follows it in the same pass."""
    last = pieces[-1] if pieces else None
    if last is not None and (last.dataset, last.epoch, last.stop) == (piece.dataset, piece.epoch, piece.start):
        pieces[-1] = replace(last, stop=piece.stop)
    else:
        pieces.append(piece)


def _words(dataset: tuple[str, int, float]) -> str:
    return f"{dataset[1]} samples of weight {dataset[2]:g}"
