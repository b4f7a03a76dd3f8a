"""The order in which a syncer's effects are carried out: nothing is told before it is durable.

The service, the fault simulator and the small-scope search use this class, each with its own disk and clock. What the
service adds (syncer/effect_queue.py): a thread, retries on a full disk, and the term check after each write.

- Effects are carried out in the order in which they were decided. Where carrying out one leads to others, they go to
  the end of the queue.
- A Persist, and the first cut, hold back everything behind them but merges until they are written.
- `RunStore.append` writes records to the journal. With durability = "round" it syncs each write; with "cut" only those
  that `must_be_synced` names.
- A merge is told to nobody, so it does not wait for the disk: it is begun while the round before it is written. It
  waits where something in front of it reads or changes the parameters (a cut, a rollback, other outer settings).
- One write is under way at a time. What is decided meanwhile waits, and goes out with the next write: `next_batch` says
  how much of it.
- A write by a syncer whose term is over counts for nothing: its queue is closed, and it tells nobody anything more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from atoll.protocol.effects import Note
from atoll.protocol.records import AnyRecord, EndedRecord, RestoredRecord, TailRecord
from atoll.protocol.syncer.effects import (
    Commit,
    ConfirmSent,
    Discard,
    Expel,
    Merge,
    Persist,
    Send,
    SyncerEffect,
    TakeCut,
)

MERGE_MAY_PASS = (Persist, Commit, Send, ConfirmSent, Discard, Expel, Note)
"""Effects that a merge of another fragment behind them does not wait for."""
P = TypeVar("P")
"""A payload: what is kept of a round or a rollback beside its record."""


class EffectOrder:
    def __init__(self) -> None:
        self._waiting: deque[SyncerEffect] = deque()
        self._durable = 0
        """How many of the waiting Persists, from the front, are written."""
        self._write: list[Persist] | TakeCut | None = None
        """What is being written."""
        self._merges = 0
        """How many of the waiting effects are merges."""
        self._merge_is_blocked = False
        """Whether the first of them has to wait until a write ends, because of effects in front of it."""
        self._busy = self._closed = False

    @property
    def has_waiting(self) -> bool:
        """Something that was decided is not durable, or not carried out yet."""
        return bool(self._waiting)

    def awaits(self, kind: type[SyncerEffect]) -> bool:
        """Whether an effect of this kind is not carried out yet."""
        return any(isinstance(effect, kind) for effect in self._waiting)

    def enqueue(self, effects: Iterable[SyncerEffect]) -> None:
        for effect in effects:
            self._waiting.append(effect)
            self._merges += isinstance(effect, Merge)

    def close(self) -> None:
        """Nothing more is written or carried out. `has_waiting` stays true, so `wait_until_empty` never returns."""
        self._closed = True

    def carry_out_ready(self, carry_out: Callable[[SyncerEffect], None]) -> None:
        """Carry out everything up to the first that must be durable and is not."""
        if self._busy:
            return  # an effect led to others while it was carried out: the loop below reaches them
        self._busy = True
        try:
            while self._waiting and not self._closed and not self._must_wait(self._waiting[0]):
                effect = self._waiting.popleft()
                self._durable -= isinstance(effect, Persist)
                self._merges -= isinstance(effect, Merge)
                carry_out(effect)
            while not self._closed and (merge := self._take_early_merge()) is not None:
                carry_out(merge)
        finally:
            self._busy = False

    def _take_early_merge(self) -> Merge | None:
        """The next merge, if nothing that waits in front of it concerns its fragment. One round at most is ahead of the
        one that is written: each takes memory."""
        if not self._merges or self._merge_is_blocked:
            return None
        self._merge_is_blocked = True
        rounds, fragments = 0, set[int]()
        for place, effect in enumerate(self._waiting):
            if isinstance(effect, Merge):
                if rounds > 1 or effect.fragment in fragments:
                    return None
                del self._waiting[place]
                self._merges -= 1
                self._merge_is_blocked = False
                return effect
            if not isinstance(effect, MERGE_MAY_PASS) or (isinstance(effect, Persist) and effect.restored):
                return None
            rounds += isinstance(effect, Persist) and effect.round >= 0
            if isinstance(effect, Commit):
                fragments.add(effect.fragment)
        return None

    def begin_write(self) -> list[Persist] | TakeCut | None:
        """What is to be written now: records that go out together, or the first cut. None: nothing, or a write is under
        way already."""
        if self._busy or self._closed or self._write is not None or not self._waiting:
            return None
        if not self._must_wait(front := self._waiting[0]):
            return None
        self._write = front if isinstance(front, TakeCut) else next_batch(self._waiting)
        return self._write

    def end_write(self, *, fenced: bool) -> bool:
        """It is written; `fenced`: by a syncer whose term is over. False: then nothing is told any more."""
        write, self._write = self._write, None
        assert write is not None, "a write has begun"
        self._merge_is_blocked = False
        if fenced:
            self.close()
        elif isinstance(write, TakeCut):
            self._waiting.popleft()
        else:
            self._durable = len(write)
        return not fenced

    def _must_wait(self, effect: SyncerEffect) -> bool:
        if isinstance(effect, Persist):
            return self._durable == 0
        return isinstance(effect, TakeCut) and effect.first


def next_batch(waiting: Iterable[SyncerEffect]) -> list[Persist]:
    """From the front, in order: all records up to the next cut, round or rollback. The payload of a round or rollback
    is made only when all in front of it is carried out, so it begins a batch."""
    batch: list[Persist] = []
    for effect in waiting:
        if isinstance(effect, TakeCut):
            break
        if isinstance(effect, Persist):
            if (effect.round >= 0 or effect.restored) and batch:
                break
            batch.append(effect)
    return batch


def entries_of(batch: Iterable[Persist], payload: Callable[[Persist], P]) -> list[tuple[AnyRecord, P | None]]:
    """The records of a write in their order. A payload belongs to the last record of its Persist."""
    entries: list[tuple[AnyRecord, P | None]] = []
    for persist in batch:
        entries += [(record, None) for record in persist.records[:-1]]
        entries.append((persist.records[-1], payload(persist)))
    return entries


def must_be_synced(records: Iterable[AnyRecord]) -> bool:
    """Whether `RunStore.append` syncs these also with durability = "cut".

    A round that a power cut takes is made again by its learners. The end is not: whoever was told of it has stopped
    and left with the finished model, so a run that forgot its end would go on from older versions without them. Nor is
    a rollback: it would take as many bad scores again. Nor is a tail average: its file is written next, and must
    not be there without its record.
    """
    return any(isinstance(record, EndedRecord | RestoredRecord | TailRecord) for record in records)
