"""A syncer's signs of life, for a standby that watches them.

One that was replaced while it stood still ends here, also with nothing to write down. Every few beats what is usual
(numerics/screen.py) is kept for the next term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from atoll.store.writer_lease import Deposed
from atoll.syncer.run_store import RunStore

BEAT_S = 1.0
"""Between two signs of life to a standby."""
NORMS_BEATS = 3
"""Beats between two notes of what is usual."""


async def beat(run_store: RunStore, run: str, norms: Callable[[], list[list[float]]]) -> None:
    """Until cancelled. `norms`: those that are usual now; empty: nothing is known yet."""
    for number in count():
        await asyncio.to_thread(run_store.beat)
        if number % NORMS_BEATS == 0 and (usual := norms()):
            await asyncio.to_thread(run_store.keep_norms, run, usual)
        if run_store.fenced():
            raise Deposed
        await asyncio.sleep(BEAT_S)
