"""The syncer's part of a cut: recorded at once, written in the background; and the manifest that makes a cut complete.

Rules kept here:
- what is recorded is Θ, the outer state and the history of one moment; rounds go on while it is written, and nobody
  uses the buffers of those versions again until it is;
- the first cut, version 0, is whole before anything behind it is told: whoever writes it waits and tries again;
- any other that cannot be written is told to the rules with the reason, and costs the run nothing but that cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from atoll.fabric.wire import one_line
from atoll.numerics.arrays import FloatArray
from atoll.protocol import effects as fx
from atoll.protocol.errors import AtollError
from atoll.syncer.parameters import Buffer, Parameters
from atoll.syncer.recovery import CutState
from atoll.syncer.run_store import RunStore


@dataclass(frozen=True, slots=True)
class Recorded:
    """The state of one moment."""

    cut: int
    state: CutState
    arrays: dict[str, FloatArray]
    held: list[Buffer]
    """Versions that must stay as they are until all is written."""


class Cuts:
    def __init__(
        self,
        run_store: RunStore,
        parameters: Parameters,
        run: str,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_store, self._parameters, self._run, self._tell, self._spawn = run_store, parameters, run, tell, spawn

    async def write_first(self, cut: fx.TakeCut) -> None:
        """Version 0, with no learner's part in it. NoRoom: it may be tried again."""
        await self._write(self._record(cut))
        await asyncio.to_thread(self._run_store.complete, self._run, fx.CompleteCut(cut.cut, (), ()))

    def take(self, cut: fx.TakeCut) -> None:
        self._spawn(self._keep(self._record(cut)))

    def complete(self, done: fx.CompleteCut) -> None:
        self._spawn(self._complete(done))

    def _record(self, cut: fx.TakeCut) -> Recorded:
        state = self._run_store.open_cut(cut.history, self._parameters.rounds())
        held = self._parameters.held()
        return Recorded(cut.cut, state, self._parameters.snapshot(), held)

    async def _keep(self, recorded: Recorded) -> None:
        reason = ""
        try:
            await self._write(recorded)
        except AtollError as error:
            reason = one_line(error)
        self._tell(fx.CutKept(recorded.cut, reason))

    async def _write(self, recorded: Recorded) -> None:
        try:
            await asyncio.to_thread(self._run_store.write_cut, recorded.cut, recorded.state, recorded.arrays)
        finally:
            for buffer in recorded.held:
                buffer.readers -= 1

    async def _complete(self, done: fx.CompleteCut) -> None:
        try:
            mark = await asyncio.to_thread(self._run_store.complete, self._run, done)
        except AtollError as error:
            self._tell(fx.CutKept(done.cut, one_line(error)))
        else:
            self._tell(fx.CutWritten(done.cut, mark))
