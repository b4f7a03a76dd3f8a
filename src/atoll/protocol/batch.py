"""What is written to the disk together, and what must survive the machine at once; in the service and in the simulated
one."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.protocol.effects import Persist, SyncerEffect, TakeCut
from atoll.protocol.records import AnyRecord, Ended, Restored


def next_batch(waiting: Iterable[SyncerEffect]) -> list[Persist]:
    """From the front, in order: whatever waits, up to an outer gradient that is not made yet or a cut."""
    batch: list[Persist] = []
    for effect in waiting:
        if isinstance(effect, TakeCut):
            break
        if isinstance(effect, Persist):
            if (effect.round >= 0 or effect.restored) and batch:
                break
            batch.append(effect)
    return batch


def must_be_synced(records: Iterable[AnyRecord]) -> bool:
    """Whether these wait for the disk also with durability = "cut".

    A round that a power cut takes is made again by its learners. The end is not: whoever was told of it has stopped
    and left with the finished model, so a run that forgot its end would go on from older versions without them. Nor is
    a rollback: it would take as many bad scores again.
    """
    return any(isinstance(record, Ended | Restored) for record in records)
