"""A rollback, as far as numbers are concerned: read beside the event loop, then kept until the journal has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from atoll.fabric.wire import one_line
from atoll.numerics.arrays import ByteArray
from atoll.protocol import effects as fx
from atoll.protocol.errors import AtollError
from atoll.syncer.parameters import Parameters
from atoll.syncer.run_store import RunStore


class Restorer:
    def __init__(
        self,
        run_store: RunStore,
        parameters: Parameters,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_store, self._parameters, self._tell, self._spawn = run_store, parameters, tell, spawn
        self.packed: ByteArray = _NONE
        """What is to be committed next."""

    def make_ready(self, restore: fx.Restore) -> None:
        self._spawn(self._read(restore))

    async def _read(self, restore: fx.Restore) -> None:
        try:
            earlier = await asyncio.to_thread(self._run_store.earlier, restore)
        except (AtollError, MemoryError) as error:
            self._tell(fx.Unrestorable(one_line(error) or "it does not fit into this syncer's memory"))
        else:
            self.packed = earlier.packed
            self._tell(earlier.told)

    def commit(self, versions: Sequence[int], at: int) -> None:
        self._parameters.restore(self.packed, versions, at - 1)
        self.packed = _NONE


_NONE: ByteArray = np.empty(0, dtype=np.uint8)
