"""What of the effects that wait may be written to the disk together, in the service and in the simulated one."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.protocol.effects import Persist, SyncerEffect, TakeCut


def next_batch(waiting: Iterable[SyncerEffect]) -> list[Persist]:
    """From the front, in order: whatever waits, up to an outer gradient that is not made yet or a cut."""
    batch: list[Persist] = []
    for effect in waiting:
        if isinstance(effect, TakeCut):
            break
        if isinstance(effect, Persist):
            if effect.round >= 0 and batch:
                break
            batch.append(effect)
    return batch
