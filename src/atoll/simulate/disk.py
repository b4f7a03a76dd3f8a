"""The run directory: the journal, cuts, and the claims of terms, with everything a disk may do to them.

An append takes `sync_s` and counts when it is done, not before. A process that dies in the middle leaves a prefix of
what it was writing, which nobody was told of. This is harsher on purpose than the real journal, which counts an append
whole or not at all (store/segments.py). With durability = "cut" an append is done at once and lies in the page cache:
it survives the process, not the machine, until the next cut, the end of the run or a rollback makes it durable. A full
disk is waited for; any other failure ends the syncer. A write by a term that somebody has claimed past counts for
nothing.

Beside the journal lies the mark of its durable end (store/end_mark.py), written once an append is durable. A crash may
fall between the two; a journal that is shorter than its mark cannot be, and ends the simulation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from atoll.protocol.history import History, HistoryState
from atoll.protocol.records import AnyRecord, BegunRecord, MergedRecord, RestoredRecord, StartedRecord, TermRecord
from atoll.protocol.syncer.effect_order import must_be_synced
from atoll.protocol.syncer.effects import Restorable, Restore
from atoll.protocol.syncer.rollback import undone

DiskEntry = tuple[AnyRecord, float | list[float] | None]
"""A record, and what belongs to it: the merged outer gradient, or the values that the run is rolled back to."""
AGAIN_S = 0.1
"""Between two tries on a full disk."""


@dataclass(slots=True)
class KeptCut:
    """The syncer's part of a cut."""

    history: HistoryState
    theta: list[float]
    place: int
    """How many of the journal's records its history holds."""


class SimulatedDisk:
    def __init__(
        self, begun: BegunRecord, dice: random.Random, *, sync_s: float = 0.0, every_round: bool = True
    ) -> None:
        self.begun, self.random = begun, dice
        self.sync_s, self.every_round = sync_s, every_round
        self.journal: list[AnyRecord] = []
        """What a reader would find."""
        self.payloads: dict[int, float | list[float]] = {}
        """Per record's place, what belongs to it."""
        self.start: list[float] = []
        """Version 0."""
        self.losses = 0
        """How often the machine went down with records that were not synced."""
        self.synced = 0
        """So many records survive the machine."""
        self.marked = 0
        """Number of records that the mark says are durable."""
        self.claim = 0
        """The newest term."""
        self.cuts: dict[int, KeptCut] = {}
        self.complete: list[int] = []
        """Of a syncer of several shards: cuts that all of them can come back from."""
        self.full = self.broken = self.cuts_fail = False
        self.slow = 1.0
        self._writing: dict[int, list[DiskEntry]] = {}
        """Per term that writes, what."""

    # ---- appends ------------------------------------------------------------------------------------------------

    def begin_append(self, term: int, entries: list[DiskEntry]) -> float:
        """Start to write; how long it takes."""
        self._writing[term] = entries
        return self.sync_s * self.slow if self._is_synced(entries) else 0.0

    def end_append(self, term: int) -> bool:
        """It is written. False: another term was claimed meanwhile, so it counts for nothing."""
        entries = self._writing.pop(term)
        if self.claim != term:
            return False
        self.append(entries)
        return True

    def append(self, entries: Sequence[DiskEntry], *, marks: bool = True) -> None:
        """`marks`: False where the writer dies before it comes to the mark."""
        for record, payload in entries:
            if payload is not None:
                self.payloads[len(self.journal)] = payload
            self.journal.append(record)
        if self._is_synced(entries):
            self.synced = len(self.journal)
            self.marked = self.synced if marks else self.marked

    def _is_synced(self, entries: Sequence[DiskEntry]) -> bool:
        return self.every_round or must_be_synced(record for record, _ in entries)

    def abandon_append(self, term: int) -> None:
        """The writer died: a prefix of what it was writing is there, or nothing, or all of it."""
        entries = self._writing.pop(term, None)
        if entries is not None and self.claim == term:
            self.append(entries[: self.random.randint(0, len(entries))], marks=False)

    def power_cut(self) -> int:
        """The machine went down: what was never synced is gone. How many records that were."""
        lost = len(self.journal) - self.synced
        self.losses += lost > 0
        for place in range(self.synced, len(self.journal)):
            self.payloads.pop(place, None)
        del self.journal[self.synced :]
        return lost

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def keep_cut(self, cut: int, history: HistoryState, theta: list[float], place: int) -> None:
        """Durable, and the journal up to it."""
        self.marked = self.synced = max(self.synced, place)
        self.cuts[cut] = KeptCut(history, theta, place)
        if not self.complete:
            for old in sorted(self.cuts)[:-2]:
                del self.cuts[old]

    def complete_cut(self, cut: int) -> None:
        """Of a syncer of several shards: those before the last ones go."""
        self.complete = [*self.complete, cut][-2:]
        self.cuts = {number: kept for number, kept in self.cuts.items() if number >= self.complete[0]}

    def read_decisions(self) -> list[AnyRecord | int]:
        """All records behind the oldest cut, and at their places the numbers of the cuts. Before the run has its first
        parameters no cut counts: others take the place of those in cut 0."""
        begun = any(isinstance(record, StartedRecord) for record in self.journal)
        places = {kept.place: cut for cut, kept in self.cuts.items()} if begun else {}
        found: list[AnyRecord | int] = []
        for place in range(min(places, default=0), len(self.journal) + 1):
            found += [places[place]] if place in places else []
            found += [self.journal[place]] if place < len(self.journal) else []
        return found

    # ---- coming back --------------------------------------------------------------------------------------------

    def recover(self, step: float) -> tuple[History, list[float]]:
        """The newest cut and the journal behind it: what a syncer knows again. `step`: the outer learning rate."""
        assert self.marked <= len(self.journal), f"{self.marked} records were durable, {len(self.journal)} are there"
        cuts = [kept for kept in self.cuts.values() if kept.place <= len(self.journal)]
        newest = max(cuts, key=lambda kept: kept.place, default=None)
        history = History(self.begun) if newest is None else History.restore(_copied(newest.history))
        theta = [] if newest is None else list(newest.theta)
        for place in range(newest.place if newest else 0, len(self.journal)):
            history.apply(self.journal[place])
            theta = self._replayed(theta, place, step)
        return history, theta

    def _replayed(self, theta: list[float], place: int, step: float) -> list[float]:
        record, payload = self.journal[place], self.payloads.get(place)
        if isinstance(record, StartedRecord):
            return list(self.start)
        if isinstance(record, RestoredRecord):
            assert isinstance(payload, list)
            return list(payload)
        if isinstance(record, MergedRecord):
            assert isinstance(payload, float)
            theta[record.fragment] -= step * payload
        return theta

    def restore_earlier(self, restore: Restore, step: float) -> tuple[list[float], Restorable]:
        """The values after so many rounds, by the whole journal."""
        history, theta, place = History(self.begun), list[float](), 0
        while not history.started or history.committed < restore.round:
            history.apply(self.journal[place])
            theta = self._replayed(theta, place, step)
            place += 1
        told = undone(self.journal, restore.round, len(theta))
        return theta, Restorable(restore.round, ("digest",) * len(theta), told)

    def claim_term(self, history: History) -> int:
        """Claim the next term and begin its segment."""
        self.claim += 1
        began = TermRecord(self.claim, 0, "", history.committed)
        history.apply(began)
        self.append([(began, None)])
        return self.claim


def _copied(state: HistoryState) -> HistoryState:
    """As it comes off a disk: its lists and dicts belong to nobody else."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=HistoryState)
